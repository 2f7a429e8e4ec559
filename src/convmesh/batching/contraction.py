"""What a convolution computes, as a value: three products that share one geometry.

An image x [N C *], a kernel w [O C/g *] and a response y [N O *] make one trilinear form,
    sum of x[n, c, l * stride - padding + dilation * j] * w[o, c, j] * y[n, o, l],
and its three derivatives are all there is: each product takes two of them and wants the third.

|            | plain convolution | transposed convolution |
|------------|-------------------|------------------------|
| x, w -> y  | forward           | gradient of the input  |
| y, w -> x  | gradient of input | forward                |
| x, y -> w  | gradient of weight| gradient of weight     |
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import Enum
from math import prod

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Replicate, Shard

from .. import _torch
from ..geometry import Convolution, Shape
from ..sharding.layout import Layout, dense_stride
from ._functorch import innermost, unwrapped


class Role(Enum):
    """An operand of the form. The value names its first two axes; spatial ones follow."""

    IMAGE = "NC"
    KERNEL = "OC"
    RESPONSE = "NO"

    @property
    def channels(self) -> int:
        """The axis that holds the groups."""
        return 0 if self is Role.KERNEL else 1


FACTORS = {
    Role.RESPONSE: (Role.IMAGE, Role.KERNEL),
    Role.IMAGE: (Role.RESPONSE, Role.KERNEL),
    Role.KERNEL: (Role.IMAGE, Role.RESPONSE),
}


@dataclass(frozen=True)
class Contraction:
    """One of the three products, for one sample."""

    wanted: Role
    geometry: Convolution
    image: Shape
    kernel: Shape
    response: Shape

    def shape(self, role: Role) -> Shape:
        return self.image if role is Role.IMAGE else self.kernel if role is Role.KERNEL else self.response

    @property
    def is_forward(self) -> bool:
        return self.wanted is (Role.IMAGE if self.geometry.transposed else Role.RESPONSE)

    @property
    def multiplications(self) -> int:
        return self.response[0] * prod(self.kernel) * prod(self.response[2:])

    def with_groups(self, factor: int) -> Contraction:
        """Return `factor` of these as one grouped convolution."""
        (n, c, *image), (o, *kernel), (_, _, *response) = self.image, self.kernel, self.response
        return Contraction(
            self.wanted,
            replace(self.geometry, groups=self.geometry.groups * factor),
            (n, c * factor, *image),
            (o * factor, *kernel),
            (n, o * factor, *response),
        )

    def with_longer(self, letter: str, factor: int) -> Contraction:
        """The same product where one of the sizes N, C, O is `factor` times as large."""
        (n, c, *image), (o, c_kernel, *kernel), (_, _, *response) = self.image, self.kernel, self.response
        n, c, c_kernel, o = (
            size * factor if name == letter else size for name, size in zip("NCCO", (n, c, c_kernel, o), strict=True)
        )
        return Contraction(self.wanted, self.geometry, (n, c, *image), (o, c_kernel, *kernel), (n, o, *response))

    def __call__(self, first: Tensor, second: Tensor, bias: Tensor | None = None) -> Tensor:
        """Compute it with torch's operator. `first` and `second` are in the order of `FACTORS`."""
        geometry = self.geometry.arguments
        if self.is_forward:
            return _convolution(first, second, bias, *geometry)
        if self.wanted is Role.KERNEL:
            absent = first.new_empty(self.kernel)
            given, taken = (first, second) if self.geometry.transposed else (second, first)
            kernel: Tensor = _backward(given, taken, absent, None, *geometry, (False, True, False))[1]
            return kernel
        absent = _placeholder(first, self.shape(self.wanted), self.geometry.groups)
        gradient: Tensor = _backward(first, absent, second, None, *geometry, (True, False, False))[0]
        return gradient


_convolution: Callable[..., Tensor] = torch.ops.aten.convolution.default
_backward: Callable[..., tuple[Tensor, ...]] = torch.ops.aten.convolution_backward.default


def _placeholder(like: Tensor, shape: Shape, groups: int) -> Tensor:
    """Return a placeholder for the operand whose gradient is wanted: torch's operator reads only its shape.

    A gradient that is a DTensor gets its placements, so it has those of the other activation.
    """
    sharded = unwrapped(like)
    if not isinstance(sharded, DTensor):
        return like.new_empty(shape)
    spec = _torch.spec_of(sharded)
    stays = [isinstance(p, Shard) and (p.dim != 1 or groups > 1) for p in spec.placements]
    placements = tuple(p if stay else Replicate() for p, stay in zip(spec.placements, stays, strict=True))
    layout = Layout(spec.mesh, placements, shape, dense_stride(shape, torch.contiguous_format), like.dtype)
    # A tensor that is made within a transform of torch.func belongs to its level; a local tensor belongs to none.
    return _torch.wrap(innermost(_torch.local_of(sharded).new_empty(layout.local_shape)), layout.spec)
