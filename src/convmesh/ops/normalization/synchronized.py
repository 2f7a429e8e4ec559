"""Training batch norms by torch's kernels of synchronised norms, on accelerators that have them.

A norm is four kernels and a message there: those that `torch.nn.SyncBatchNorm` calls. They are chosen by what all ranks
know, and called as that module calls them: other types, or memory in another order, they misread.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

from ... import _torch
from ...comm import all_gather_stacked, are_few
from ...kernels.normalization import Pair, moments_of_channels
from ...sharding.layout import Layout
from ..reductions.plan import wide
from .common import Spread

KERNELS = (
    "aten::batch_norm_stats", "aten::batch_norm_gather_stats_with_counts", "aten::batch_norm_elemt",
    "aten::batch_norm_backward_reduce", "aten::batch_norm_backward_elemt",
)  # fmt: skip
COUNTED = range(2, 2**31)  # values of one channel: the kernels count them as int32, and divide by one less


@cache
def _on(device: str) -> bool:
    return all(_torch.has_kernel(name, device) for name in KERNELS)


def fused(spread: Spread, input: Layout, *parameters: Layout | None) -> bool:
    """Whether a training norm goes by these kernels, unless a compiler traces it."""
    types = {parameter.dtype for parameter in parameters if parameter is not None}
    right = spread.count in COUNTED and (not types or types in ({input.dtype}, {wide(input.dtype)}))
    return right and _on(input.mesh.device_type)


def moments(spread: Spread, x: torch.Tensor, running: tuple[Any, ...], momentum: float, eps: float) -> Pair:
    """Mean and reciprocal deviation by channel over all ranks; the `running` statistics, if any, move towards them."""
    means, deviations, counts = _of_ranks(spread, x, eps)
    kept_mean, kept_var = running
    # The first argument only says what type the others have.
    return torch.batch_norm_gather_stats_with_counts(
        means, means, deviations, kept_mean, kept_var, momentum, eps, counts
    )


def _of_ranks(spread: Spread, x: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """[rank C] [rank C] [rank]: of those ranks that have any values, or of all of them together where they are many."""
    dtype = wide(x.dtype)
    room = x.new_zeros((2, x.shape[1]), dtype=dtype)
    if not are_few(room, spread.mesh, spread.mesh_dims):
        mean, var = spread.merge(*moments_of_channels(x.to(dtype)))
        return mean[None], (var + eps).rsqrt_()[None], spread.total.on(x.device, dtype)
    own = torch.stack(torch.batch_norm_stats(dense(x), eps)) if x.numel() else room
    every = all_gather_stacked(own, spread.mesh, spread.mesh_dims)
    if 0 in spread.counts:
        every = every.index_select(0, spread.owners.on(x.device))
    return every[:, 0].contiguous(), every[:, 1].contiguous(), spread.owned.on(x.device, dtype)


def normalised(x: torch.Tensor, w: Any, b: Any, mean: torch.Tensor, rstd: torch.Tensor, eps: float) -> torch.Tensor:
    """[N C space] -> [N C space]"""
    return torch.batch_norm_elemt(dense(x), w, b, mean, rstd, eps) if x.numel() else x


def gradients(
    spread: Spread, gy: torch.Tensor, x: torch.Tensor, w: Any, moments: Pair, for_input: bool
) -> tuple[torch.Tensor | None, Pair]:
    """That of the input, if asked for, and of weight and bias, over all ranks."""
    mean, rstd = moments
    x = dense(x)
    gy = gy.to(x.dtype).contiguous(memory_format=_format(x))
    if x.numel():
        sums = torch.batch_norm_backward_reduce(gy, x, mean, rstd, w, True, False, False)[:2]
    else:
        sums = torch.zeros_like(mean), torch.zeros_like(mean)
    plain, products = spread.add_up(*sums)
    gx = None
    if for_input:
        gx, count = torch.empty_like(x), spread.total.on(x.device, torch.int32)
        if x.numel():
            weight = w if w is None else w.to(mean.dtype)
            gx = torch.batch_norm_backward_elemt(gy, x, mean, rstd, weight, plain, products, count)
    return gx, (products * rstd, plain)


def dense(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous(memory_format=_format(x))


def _format(x: torch.Tensor) -> torch.memory_format:
    """Channels last where they are, and nothing else is."""
    last = {4: torch.channels_last, 5: torch.channels_last_3d}.get(x.dim())
    is_last = last is not None and not x.is_contiguous() and x.is_contiguous(memory_format=last)
    return last if is_last and last is not None else torch.contiguous_format
