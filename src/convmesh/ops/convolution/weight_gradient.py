"""Weight gradients in other ways than the operator's own, where these are faster on CPUs.

The one of a depthwise convolution is a convolution itself (`correlation.py`). In 3-d that of every tap along the first
spatial dimension is a sum over planes, as a convolution in 2-d computes it of a batch; with short vectors libraries are
better at that.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache

import torch

from ... import _torch
from ...correlation import correlate, pays
from ...geometry import Convolution, Interval

aten = torch.ops.aten

# Measured: fewer channels, smaller tensors, and strides, for which planes do not lie side by side, lose by it.
FEWEST_CHANNELS, FEWEST_VALUES = 4, 1 << 17
# So many planes at a time need little memory, and are in the cache for all taps.
PLANES = 8


def faster_way(
    fine: torch.Tensor, coarse: torch.Tensor, weight: torch.Tensor, conv: Convolution
) -> Callable[[], torch.Tensor] | None:
    """What computes the weight's gradient, if not the operator itself."""
    if pays(fine, weight, conv.groups):
        return lambda: _correlated(fine, coarse, weight, conv)
    if _planes_pay(fine, weight, conv):
        return lambda: by_planes(fine, coarse, weight, conv)
    return None


def _correlated(fine: torch.Tensor, coarse: torch.Tensor, weight: torch.Tensor, conv: Convolution) -> torch.Tensor:
    """The weight gradient of a depthwise convolution: [N C fine] [N C coarse] -> [C 1 kernel]."""
    rows = correlate(fine.flatten(0, 1), coarse.flatten(0, 1), weight.shape[2:], conv)
    return rows.view(*fine.shape[:2], *rows.shape[1:]).sum(0)[:, None]


def _planes_pay(fine: torch.Tensor, weight: torch.Tensor, conv: Convolution) -> bool:
    wide = min(weight.shape[:2]) >= FEWEST_CHANNELS and min(weight.shape[2:]) > 1
    simple = weight.dim() == 5 and conv.groups == 1 and conv.stride[0] == 1
    here = fine.is_cpu and fine.dtype == torch.float32 and fine.is_contiguous() and not _torch.tracing()
    return here and simple and wide and fine.numel() >= FEWEST_VALUES and _slow_in_3d()


@cache
def _slow_in_3d() -> bool:
    """With vectors of 512 bits the library's own kernels take a fifth less than those by planes, else about twice as
    long."""
    return torch.backends.cpu.get_cpu_capability() != "AVX512"


def by_planes(fine: torch.Tensor, coarse: torch.Tensor, weight: torch.Tensor, conv: Convolution) -> torch.Tensor:
    """[N C D H W] [N O d h w] -> [O C kernel], with a stride of 1 along the first spatial dimension."""
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
    """[N C D H W] -> [N D C H W] in new memory, of a part of D."""
    return tensor[:, :, part.start : part.stop].transpose(1, 2).contiguous()
