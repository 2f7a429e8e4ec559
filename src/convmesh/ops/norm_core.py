"""What all normalisations share: moments of a rank's own values, merged over the ranks that cut what they are taken of.

The merged moments cost one all-reduce of a few numbers, and then every rank normalises what it has. Backward is the
same with the two sums that its formula needs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import takewhile
from math import prod
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Partial, Placement, Replicate, Shard

from ..comm import start_reducing
from ..sharding.dispatch import place
from ..sharding.layout import Layout, dense_stride
from ..sharding.rows import Assignment, Row, Wanted, choose, input_placements
from .moments import merge
from .numbers import Numbers
from .reduce_plan import absent, counts, cutting

aten = torch.ops.aten

Pair = tuple[torch.Tensor, torch.Tensor]
Named = Sequence[tuple[str, Layout | None]]


@dataclass(frozen=True)
class Spread:
    """Over which ranks one set of moments is spread, and which share of its values each of them has."""

    mesh: DeviceMesh
    mesh_dims: tuple[int, ...]
    shares: tuple[Any, ...]  # by rank: a number, or one for every set
    count: int  # values of one set, on all ranks together

    @staticmethod
    def over(layout: Layout, dims: Sequence[int]) -> Spread:
        mesh_dims = cutting(layout, dims)
        found = counts(layout, dims, mesh_dims)
        return Spread(layout.mesh, mesh_dims, tuple(n / max(1, sum(found)) for n in found), sum(found))

    def merge(self, mean: torch.Tensor, var: torch.Tensor) -> Pair:
        return merge(mean, var, self._weights, self.mesh, self.mesh_dims)

    @cached_property
    def _weights(self) -> Numbers:
        return Numbers(self.shares)

    def add_up(self, one: torch.Tensor, other: torch.Tensor) -> Pair:
        """Two sums over all ranks, in one all-reduce."""
        if not self.mesh_dims:
            return one, other
        return self.start_adding_up(one, other)()

    def start_adding_up(self, one: torch.Tensor, other: torch.Tensor) -> Callable[[], Pair]:
        """The same, to be awaited while something else is done."""
        finish = start_reducing(torch.stack([one, other]), self.mesh, self.mesh_dims)

        def both() -> Pair:
            first, second = finish()
            return first, second

        return both


def canonical(local: torch.Tensor, memory_format: torch.memory_format) -> torch.Tensor:
    """In this memory format, also by the strides of dimensions of size 1, which say nothing otherwise.

    Kernels guess the format from all strides, and complain where the guess is wrong: a part with one sample may have
    the strides of the view that it came from.
    """
    local = local.contiguous(memory_format=memory_format)
    stride = dense_stride(tuple(local.shape), memory_format)
    return local if local.stride() == stride else local.as_strided(local.shape, stride)


@lru_cache(maxsize=256)
def rows(kept: tuple[int, ...], scaled: tuple[tuple[int, int], ...], parameters: int) -> tuple[Row, ...]:
    """(input, *parameters) -> (): along `kept` dimensions parameters are whole, along `scaled` ones cut like the input.

    `scaled` are pairs of a dimension of the input and the parameters' dimension that goes with it.
    """
    whole = (Replicate(),) * parameters
    return (
        Row("replicated", (Replicate(), *whole), ()),
        *[Row("kept", (Shard(dim), *whole), ()) for dim in kept],
        *[Row("scaled", (Shard(dim), *[Shard(other)] * parameters), ()) for dim, other in scaled],
    )


def arrange(
    operator: str, table: Sequence[Row], named: Named, fits: Callable[[Assignment], bool] = lambda assignment: True
) -> tuple[Layout | None, ...]:
    """Where the operands go, at least cost."""
    chosen = choose(operator, table, named, fits=fits)
    return tuple(t and t.placed(input_placements(chosen, number)) for number, (_, t) in enumerate(named))


def parameter_gradient(parameter: Layout, input: Layout, placed: Layout, pending: bool) -> tuple[Layout, Layout]:
    """Where the gradient of a parameter that was `placed` beside the `input` is, and where it goes.

    `pending` if every rank has the sum over its own part of the input only.
    """
    sums = tuple(
        Partial() if pending and isinstance(at, Shard) and not isinstance(beside, Shard) else beside
        for at, beside in zip(input.placements, placed.placements, strict=True)
    )
    wanted = Wanted(parameter.placements, prod(parameter.shape))
    return placed.placed(sums), placed.placed(tuple(wanted.becomes(*entry) for entry in enumerate(sums)))


def new(like: Layout, shape: tuple[int, ...], placements: tuple[Placement, ...], dtype: torch.dtype) -> Layout:
    return Layout(like.mesh, placements, shape, dense_stride(shape, torch.contiguous_format), dtype)


def place_parameters(
    gradients: Sequence[torch.Tensor], places: Sequence[tuple[Layout, Layout]], asked: Sequence[bool]
) -> tuple[DTensor | None, ...]:
    """The gradients of the parameters that are asked for, in the parameters' type and where they go."""
    return tuple(
        place(gradient.to(computed.dtype), computed, wanted) if needed else None
        for gradient, (computed, wanted), needed in zip(gradients, places, asked, strict=True)
    )


def all_absent(input: DTensor, layouts: Sequence[Layout], asked: Sequence[bool]) -> tuple[DTensor | None, ...]:
    """The gradients that a rank outside of the mesh returns."""
    return tuple(absent(input, layout) if needed else None for layout, needed in zip(layouts, asked, strict=True))


def kernel_eps(eps: float, dtype: torch.dtype) -> float:
    """What a kernel may add to the variance of a rank's own values, which can be zero: always something."""
    return eps if eps > 0 else torch.finfo(dtype).tiny


def variance(rstd: torch.Tensor, eps: float) -> torch.Tensor:
    """What a kernel made its reciprocal deviation of: right to the rounding of its sum with `eps`, as it is used."""
    return (rstd.pow(-2) - eps).clamp_(min=0)


def correct(normal: torch.Tensor, own: Pair, common: Pair, weight: Any = None, bias: Any = None) -> torch.Tensor:
    """In place: values normalised by the rank's own (mean, rstd) become values normalised by the common ones.

    Weight and bias, if there are any, have one number for each set of moments: so all of it takes two passes.
    """
    scale, shift = common[1] / own[1], (own[0] - common[0]) * common[1]
    if weight is not None:
        scale, shift = scale * weight, shift * weight
    return normal.mul_(scale).add_(shift if bias is None else shift + bias)


def sums_by_set(gy: torch.Tensor, x: torch.Tensor, mean: torch.Tensor, rstd: torch.Tensor) -> Pair:
    """Sums of the gradient, and of the gradient times the normalised input, over the dimensions where `mean` has one
    index, all of which are the last. They are left with size 1."""
    if not x.numel():
        return torch.zeros_like(mean), torch.zeros_like(mean)
    if not (gy.is_contiguous() and x.is_contiguous()):
        inner = [-1 - number for number, _ in enumerate(takewhile(lambda size: size == 1, reversed(mean.shape)))]
        return gy.sum(inner, keepdim=True), ((x - mean).mul_(rstd).mul_(gy)).sum(inner, keepdim=True)
    # One kernel makes both sums in one pass, without anything of the input's size: they are the gradients of weight
    # and bias in a batch norm of one sample, of which every set is a channel.
    sets = mean.numel()
    gy, x = (t.view(1, sets, t.numel() // sets) for t in (gy, x))
    saved = (mean.reshape(sets), rstd.reshape(sets))
    asked = [False, True, True]
    _, products, plain = aten.native_batch_norm_backward.default(gy, x, None, None, None, *saved, True, 0.0, asked)
    return plain.view_as(mean), products.view_as(mean)


def input_gradient(
    gy: torch.Tensor, x: torch.Tensor, moments: Pair, means: Callable[[], Pair], weight: Any = None
) -> torch.Tensor:
    """In new memory, from the means over all ranks of the gradient, and of the gradient times the normalised input.

    It is a linear function of gradient and input, with one set of coefficients for each set of moments. Of these the
    gradient's own is known before the means are there.
    """
    mean, rstd = moments
    result = gy * (rstd if weight is None else rstd * weight)
    plain, products = means()
    by_input = -rstd.square() * products
    return result.addcmul_(x, by_input).sub_(by_input * mean + rstd * plain)
