"""Batch norm on accelerators, with the kernels of `torch.nn.SyncBatchNorm`.

These would misread other dtypes or memory formats than they expect. Moments come from `batch_norm_update_stats`, which
is `batch_norm_stats` but returns the variance in place of the reciprocal deviation, which is infinite for constant
values.
"""

from __future__ import annotations

from functools import cache

import torch

from .. import _torch
from . import batch_norm
from .batch_norm import Merge, Normalised, Optional, Running

aten = torch.ops.aten

KERNELS = (
    "aten::batch_norm_update_stats", "aten::batch_norm_gather_stats_with_counts", "aten::batch_norm_elemt",
    "aten::batch_norm_backward_reduce", "aten::batch_norm_backward_elemt",
)  # fmt: skip
COUNTED = range(2, 2**31)  # values of one channel: the kernels count them as int32, and divide by one less
HALF = (torch.float16, torch.bfloat16)


@cache
def _on(device: str) -> bool:
    return all(_torch.has_kernel(name, device) for name in KERNELS)


def _fits(x: torch.Tensor, dtype: torch.dtype, values: int, *parameters: Optional) -> bool:
    """Whether the kernels support the call. Depends only on what all ranks know: number of values, and dtypes."""
    types = {one.dtype for one in parameters if one is not None}
    wide = torch.float32 if x.dtype in HALF else x.dtype
    right = dtype == wide and values in COUNTED and (not types or types in ({x.dtype}, {dtype}))
    return right and _on(x.device.type) and not _torch.tracing()


def _channel_moments(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return torch.stack(aten.batch_norm_update_stats.default(dense(x), None, None, 0.0)).unsqueeze(0)


def _takes_moments(x: torch.Tensor, dtype: torch.dtype) -> bool:
    return bool(x.numel()) and _fits(x, dtype, COUNTED[0])


def _normalised(
    x: torch.Tensor, moments: torch.Tensor, merge: Merge, eps: float, weight: Optional, bias: Optional,
    running: Running,
) -> Normalised:  # fmt: skip
    if merge.owners is not None:  # the kernel would make NaN of those that have nothing
        moments = moments.index_select(0, merge.owners(x.device, torch.int64))
    means, deviations = moments[:, 0], moments[:, 1].add(eps).rsqrt_()
    counts = merge.owned(x.device, moments.dtype)
    # The first argument only says what type the others have.
    mean, rstd = torch.batch_norm_gather_stats_with_counts(
        means, means, deviations, running.mean, running.var, running.momentum, eps, counts
    )
    y = torch.batch_norm_elemt(dense(x), weight, bias, mean, rstd, eps) if x.numel() else x.clone()
    return Normalised(y, mean, rstd)


def _takes_input(
    x: torch.Tensor, moments: torch.Tensor, merge: Merge, eps: float, weight: Optional, bias: Optional,
    running: Running,
) -> bool:  # fmt: skip
    kept = all(one is None or one.dtype == moments.dtype for one in running[:2])
    return kept and _fits(x, moments.dtype, merge.values, weight, bias)


def _channel_sums(gy: torch.Tensor, x: torch.Tensor, mean: torch.Tensor, rstd: torch.Tensor) -> torch.Tensor:
    x = dense(x)
    plain, products, *_ = torch.batch_norm_backward_reduce(_beside(gy, x), x, mean, rstd, None, True, False, False)
    return torch.stack([products * rstd, plain])


def _takes_gradient(gy: torch.Tensor, x: torch.Tensor, mean: torch.Tensor, rstd: torch.Tensor) -> bool:
    return bool(x.numel()) and _fits(x, mean.dtype, COUNTED[0])


def _gradient(
    gy: torch.Tensor, x: torch.Tensor, mean: torch.Tensor, rstd: torch.Tensor, weight: Optional, sums: torch.Tensor,
    count: int,
) -> torch.Tensor:  # fmt: skip
    x = dense(x)
    weight = None if weight is None else weight.to(mean.dtype)
    products, plain = sums[0] / rstd, sums[1].contiguous()
    values = torch.full((1,), count, dtype=torch.int32, device=x.device)
    return torch.batch_norm_backward_elemt(_beside(gy, x), x, mean, rstd, weight, plain, products, values)


def _takes_sums(
    gy: torch.Tensor, x: torch.Tensor, mean: torch.Tensor, rstd: torch.Tensor, weight: Optional, sums: torch.Tensor,
    count: int,
) -> bool:  # fmt: skip
    return bool(x.numel()) and _fits(x, mean.dtype, count, weight)


def dense(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous(memory_format=_format(x))


def _beside(gy: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return gy.to(x.dtype).contiguous(memory_format=_format(x))


def _format(x: torch.Tensor) -> torch.memory_format:
    """Return channels_last for tensors that are in that format and not contiguous, else contiguous_format."""
    last = {4: torch.channels_last, 5: torch.channels_last_3d}.get(x.dim())
    is_last = last is not None and not x.is_contiguous() and x.is_contiguous(memory_format=last)
    return last if is_last and last is not None else torch.contiguous_format


def register(device: str) -> None:
    """Use these kernels on a type of device, if it has them."""
    batch_norm.channel_moments.on(device, when=_takes_moments)(_channel_moments)
    batch_norm.normalised_by_ranks.on(device, when=_takes_input)(_normalised)
    batch_norm.channel_sums.on(device, when=_takes_gradient)(_channel_sums)
    batch_norm.gradient_by_sums.on(device, when=_takes_sums)(_gradient)


for _device in ("cuda", "xpu"):
    register(_device)
