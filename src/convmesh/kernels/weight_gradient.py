"""The weight gradient of a convolution on one rank, with algorithms that are faster on CPUs than torch's operator.

For a depthwise convolution, it is a convolution itself. In 3-d, each index of the kernel along the first spatial
dimension needs a sum over planes, which is the weight gradient of a 2-d convolution; on CPUs with short vectors,
libraries are faster at that.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache

import torch

from .. import _torch
from ..geometry import Convolution, Interval
from .backend import Kernel
from .turn import Turn

aten = torch.ops.aten

# Depthwise kernels of these sizes along the last dimension, which is as much as libraries keep in registers.
SMALLEST, LARGEST = 4, 9
# Measured: fewer channels, smaller tensors, and strides, for which planes are not adjacent, lose by planes.
FEWEST_CHANNELS, FEWEST_VALUES = 4, 1 << 17
# So many planes at a time need little memory, and are in the cache for all taps.
PLANES = 8


@Kernel
def weight_gradient(fine: torch.Tensor, coarse: torch.Tensor, weight: torch.Tensor, conv: Convolution) -> torch.Tensor:
    """`[N C fine] [N O coarse] -> [O C kernel]`, for a convolution from fine to coarse that is not transposed."""
    turn = Turn.of(coarse)
    result = aten.convolution_backward.default(
        turn.tensor(coarse), turn.tensor(fine), turn.tensor(weight), None,
        turn.sizes(conv.stride), turn.sizes(conv.padding), turn.sizes(conv.dilation),
        False, [0] * len(conv.stride), conv.groups, [False, True, False],
    )  # fmt: skip
    return turn.back(result[1])


def correlation_pays(fine: torch.Tensor, coarse: torch.Tensor, weight: torch.Tensor, conv: Convolution) -> bool:
    """Whether correlation is faster: 9 to 20 times were measured, and 2 to 4 for channels_last, which is copied."""
    depthwise = weight.shape[0] == conv.groups and weight.shape[1] == 1
    sizes = weight.shape[2:]
    return depthwise and fine.dtype == torch.float32 and min(sizes) >= SMALLEST and sizes[-1] <= LARGEST


@weight_gradient.on("cpu", when=correlation_pays)
def _correlated(fine: torch.Tensor, coarse: torch.Tensor, weight: torch.Tensor, conv: Convolution) -> torch.Tensor:
    """Depthwise convolutions: `[N C fine] [N C coarse] -> [C 1 kernel]`."""
    rows = correlate(fine.flatten(0, 1), coarse.flatten(0, 1), weight.shape[2:], conv)
    return rows.view(*fine.shape[:2], *rows.shape[1:]).sum(0)[:, None]


def correlate(fine: torch.Tensor, coarse: torch.Tensor, kernel: Sequence[int], conv: Convolution) -> torch.Tensor:
    """`[M fine] [M coarse] -> [M kernel]`: for each row, the weight gradient of a convolution with one channel.

    The sum over o of `fine[o * stride + dilation * j] * coarse[o]` is itself a convolution of fine with coarse, with
    stride and dilation exchanged, which libraries compute far faster.
    """
    rows, none = fine.shape[0], (0,) * len(kernel)
    geometry = (conv.dilation, conv.padding, conv.stride, False, none, rows)
    result: torch.Tensor = aten.convolution.default(fine[None], coarse[:, None], None, *geometry)[0]
    # A fine side that is longer than its last window needs makes taps that the kernel does not have.
    for axis, size in enumerate(kernel, 1):
        result = result.narrow(axis, 0, size)
    return result


def planes_pay(fine: torch.Tensor, coarse: torch.Tensor, weight: torch.Tensor, conv: Convolution) -> bool:
    if weight.dim() != 5 or conv.groups != 1 or conv.stride[0] != 1 or _torch.tracing():
        return False
    wide = min(weight.shape[:2]) >= FEWEST_CHANNELS and min(weight.shape[2:]) > 1
    large = fine.dtype == torch.float32 and fine.is_contiguous() and fine.numel() >= FEWEST_VALUES
    return wide and large and _slow_in_3d()


@cache
def _slow_in_3d() -> bool:
    """Whether the library's 3-d kernels are slow: without 512-bit vectors they take twice the time of planes."""
    return torch.backends.cpu.get_cpu_capability() != "AVX512"


@weight_gradient.on("cpu", when=planes_pay)
def by_planes(fine: torch.Tensor, coarse: torch.Tensor, weight: torch.Tensor, conv: Convolution) -> torch.Tensor:
    """`[N C D H W] [N O d h w] -> [O C kernel]`, with stride 1 along the first spatial dimension."""
    across = replace(conv.without(0), transposed=False, output_padding=(0,) * (fine.dim() - 3))
    result = torch.zeros_like(weight)
    shifts = [tap * conv.dilation[0] - conv.padding[0] for tap in range(weight.shape[2])]
    whole = Interval(0, fine.shape[2])
    for start in range(0, coarse.shape[2], PLANES):
        written = Interval(start, min(start + PLANES, coarse.shape[2]))
        read = Interval(written.start + shifts[0], written.stop + shifts[-1]) & whole
        responses, images = _planes(coarse, written), _planes(fine, read)
        for tap, shift in enumerate(shifts):
            here = written & read.shift(-shift)
            if here:
                response = responses[:, here.start - written.start : here.stop - written.start].flatten(0, 1)
                image = images[:, here.start + shift - read.start : here.stop + shift - read.start].flatten(0, 1)
                operands = response, image, weight[:, :, tap], None
                result[:, :, tap] += aten.convolution_backward.default(
                    *operands, *across.arguments, [False, True, False]
                )[1]
    return result


def _planes(tensor: torch.Tensor, part: Interval) -> torch.Tensor:
    """`[N C D H W] -> [N D C H W]`, a copy of a part of D."""
    return tensor[:, :, part.start : part.stop].transpose(1, 2).contiguous()
