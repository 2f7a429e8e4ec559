"""Linear layers over the last dimension of tensors with sharded dimensions before it.

torch flattens those dimensions into one, and what a sharded inner dimension becomes there is no Shard of it. A linear
layer is a convolution with a kernel of 1, whose rules know all placements and keep every one: so it is run as that,
on a channels_last view, which costs no copy and computes the same product.
"""

from __future__ import annotations

import torch
from torch.distributed.tensor import DTensor

from ... import _torch
from ...sharding.registry import Behaviour, composite

aten = torch.ops.aten

LINEAR = Behaviour("all dimensions before the last, features in and out, Partial(sum)", "nothing")


@composite("linear", LINEAR)
def linear(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """[... I] [O I] [O] -> [... O]"""
    if _is_pointwise(input, weight, bias):
        return _pointwise(input, weight, bias)
    result: torch.Tensor = _torch.composite(aten.linear.default, (input, weight, bias), {})
    return result


def _pointwise(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    input = input.contiguous()  # as one device makes it, so that gradients have its strides
    if input.dim() < 4:
        return _pointwise(input.unsqueeze(1), weight, bias).squeeze(1)
    spatial = input.dim() - 2
    kernel = weight.view(*weight.shape, *[1] * spatial)
    channels_first = input.permute(0, input.dim() - 1, *range(1, input.dim() - 1))
    zeros, ones = [0] * spatial, [1] * spatial
    output = torch.convolution(channels_first, kernel, bias, ones, zeros, ones, False, zeros, 1)
    # A convolution keeps the order of its input in memory, and a linear layer does not: others view what it returns.
    return output.permute(0, *range(2, output.dim()), 1).contiguous()


def _is_pointwise(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> bool:
    placed = all(tensor is None or isinstance(tensor, DTensor) for tensor in (input, weight, bias))
    if not placed or weight.dim() != 2 or not input.dtype.is_floating_point:
        return False
    if 0 in input.shape or 0 in weight.shape:
        return False  # a convolution has no output of size 0
    return input.dim() in (3, 4, 5)  # a plain matrix has a rule of its own


@composite("matmul", LINEAR)
def matmul(input: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """A product with a matrix is a linear layer; any other is left to torch."""
    if _is_pointwise(input, other, None):
        return _pointwise(input, other.t(), None)
    result: torch.Tensor = _torch.composite(aten.matmul.default, (input, other), {})
    return result
