"""A convolution whose kernel has one index is a product of matrices, if the channels lie innermost in memory.

Linear layers come here as such convolutions. As products they are what one device computes, by the same kernels, and
without the zeros that a convolution's own kernels write first.

With a stride it skips most of its input. Taking what it reads before, and putting gradients back in their places after,
is faster on CPUs than kernels that skip: those take two times as long for the gradient of the input.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from ...comm import memory_format
from ...geometry import Convolution, Window


def is_pointwise(conv: Convolution, windows: Sequence[Window]) -> bool:
    return not conv.transposed and conv.groups == 1 and all(window == Window(kernel=1) for window in windows)


def skips(conv: Convolution, windows: Sequence[Window]) -> bool:
    """Whether it reads indices one by one and not all of them, beginning with the first."""
    alone = all(window.kernel == 1 for window in windows) and not any(conv.padding)
    return not conv.transposed and alone and any(step > 1 for step in conv.stride)


def _read(tensor: torch.Tensor, stride: Sequence[int]) -> torch.Tensor:
    everything = slice(None)
    return tensor[(everything, everything, *(slice(None, None, step) for step in stride))]


def thinned(input: torch.Tensor, stride: Sequence[int]) -> torch.Tensor:
    """What is read of an input, in its memory format."""
    return _read(input, stride).clone(memory_format=memory_format(input))


def spread(gradient: torch.Tensor, input: torch.Tensor, stride: Sequence[int]) -> torch.Tensor:
    """The gradient of an input from that of what was read of it."""
    result = torch.zeros_like(input, dtype=gradient.dtype)
    _read(result, stride).copy_(gradient)
    return result


def channels_innermost(tensor: torch.Tensor) -> bool:
    return tensor.movedim(1, -1).is_contiguous()


def product(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return F.linear(input.movedim(1, -1), weight.flatten(1), bias).movedim(-1, 1)


def product_gradients(
    gradient: torch.Tensor, input: torch.Tensor, weight: torch.Tensor, mask: Sequence[bool]
) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
    """Of input, weight and bias, where `mask` asks for them."""
    matrix = weight.flatten(1)
    gy = gradient.movedim(1, -1)
    rows = gy.flatten(0, -2)  # a copy, for all three, where the gradient's channels do not lie innermost
    gx = (rows @ matrix).view(*gy.shape[:-1], matrix.shape[1]).movedim(-1, 1) if mask[0] else None
    gw = (rows.t() @ input.movedim(1, -1).flatten(0, -2)).view(weight.shape) if mask[1] else None
    return gx, gw, rows.sum(0) if mask[2] else None
