"""A convolution on one rank, and its gradients: torch's operator, or something faster that computes the same.

A convolution with a kernel of size 1 is a matrix product, if the tensors are channels_last. Linear layers come here as
such convolutions; as matrix products they use the same kernels as on one device.

A kernel of size 1 with a stride reads few of the inputs. On CPUs it is faster to copy these first, and to scatter the
gradient afterwards: the strided kernels take twice as long for the gradient of the input.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache

import torch
import torch.nn.functional as F

from ..geometry import Convolution
from ..strides import memory_format
from .backend import Kernel
from .weight_gradient import weight_gradient

aten = torch.ops.aten

FEW = 1 << 14  # elements of an input from which the operator alone is quicker than several

Gradients = tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]


@Kernel
def convolution(
    input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, conv: Convolution
) -> torch.Tensor:
    """Convolve tensors that are not empty."""
    if _channels_innermost(input) and _is_pointwise(weight, conv):
        return F.linear(input.movedim(1, -1), weight.flatten(1), bias).movedim(-1, 1)
    return torch.convolution(input, weight, bias, *conv.arguments)


@Kernel
def convolution_backward(
    gradient: torch.Tensor, input: torch.Tensor, weight: torch.Tensor, conv: Convolution, mask: Sequence[bool]
) -> Gradients:
    """Return the gradients of input, weight and bias; None for those that `mask` does not ask for."""
    # The gradient may have any memory format.
    if _channels_innermost(input) and _is_pointwise(weight, conv):
        return _product_gradients(gradient, input, weight, mask)
    fine, coarse = (gradient, input) if conv.transposed else (input, gradient)
    faster = weight_gradient.faster(fine, coarse, weight, conv) if mask[1] else None
    operands = gradient, input, weight, [gradient.shape[1]], *conv.arguments
    if faster is None and mask[1]:
        results = aten.convolution_backward.default(*operands, mask)
        gx, gw, gb = (result if wanted else None for result, wanted in zip(results, mask, strict=True))
        return gx, gw, gb
    # If asked for the bias, the operator would also compute the weight's gradient.
    return (
        aten.convolution_backward.default(*operands, [True, False, False])[0] if mask[0] else None,
        None if faster is None else faster(fine, coarse, weight, conv),
        bias_gradient(gradient) if mask[2] else None,
    )


def bias_gradient(gradient: torch.Tensor) -> torch.Tensor:
    return gradient.sum([0, *range(2, gradient.dim())])


def _has_taps(weight: torch.Tensor) -> bool:
    return weight.shape[-1] > 1 or max(weight.shape[2:]) > 1


def _is_pointwise(weight: torch.Tensor, conv: Convolution) -> bool:
    if _has_taps(weight) or conv.transposed or conv.groups > 1:
        return False
    return max(conv.stride) == max(conv.dilation) == 1 and not any(conv.padding)


def _channels_innermost(tensor: torch.Tensor) -> bool:
    if tensor.stride(1) != 1 and tensor.shape[1] > 1:
        return False  # nearly always, and without a view
    return tensor.movedim(1, -1).is_contiguous()


def _product_gradients(
    gradient: torch.Tensor, input: torch.Tensor, weight: torch.Tensor, mask: Sequence[bool]
) -> Gradients:
    matrix = weight.flatten(1)
    gy = gradient.movedim(1, -1)
    rows = gy.flatten(0, -2)  # a copy, for all three, where the gradient is not channels_last
    gx = (rows @ matrix).view(*gy.shape[:-1], matrix.shape[1]).movedim(-1, 1) if mask[0] else None
    gw = (rows.t() @ input.movedim(1, -1).flatten(0, -2)).view(weight.shape) if mask[1] else None
    return gx, gw, rows.sum(0) if mask[2] else None


def _skips(weight: torch.Tensor, conv: Convolution) -> bool:
    """Whether it is a strided convolution with a kernel of size 1, without padding."""
    if _has_taps(weight) or conv.transposed:
        return False
    return max(conv.stride) > 1 and not any(conv.padding)


@convolution.on("cpu", when=lambda input, weight, bias, conv: input.numel() > FEW and _skips(weight, conv))
def _of_what_is_read(
    input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, conv: Convolution
) -> torch.Tensor:
    return convolution(_thinned(input, conv), weight, bias, _unskipping(conv))


@convolution_backward.on(
    "cpu", when=lambda gradient, input, weight, conv, mask: input.numel() > FEW and _skips(weight, conv)
)
def _to_what_was_read(
    gradient: torch.Tensor, input: torch.Tensor, weight: torch.Tensor, conv: Convolution, mask: Sequence[bool]
) -> Gradients:
    gx, gw, gb = convolution_backward(gradient, _thinned(input, conv), weight, _unskipping(conv), mask)
    if gx is None:
        return None, gw, gb
    result = torch.zeros_like(input, dtype=gx.dtype)
    _read(result, conv).copy_(gx)
    return result, gw, gb


def _read(tensor: torch.Tensor, conv: Convolution) -> torch.Tensor:
    everything = slice(None)
    return tensor[(everything, everything, *(slice(None, None, step) for step in conv.stride))]


def _thinned(input: torch.Tensor, conv: Convolution) -> torch.Tensor:
    """Return the elements of an input that are read, in its memory format."""
    return _read(input, conv).clone(memory_format=memory_format(input))


@lru_cache(maxsize=256)
def _unskipping(conv: Convolution) -> Convolution:
    """Return the convolution without stride, for an input that is already thinned."""
    ones = (1,) * len(conv.stride)
    return replace(conv, stride=ones, dilation=ones)
