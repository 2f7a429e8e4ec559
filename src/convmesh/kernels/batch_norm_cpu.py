"""Batch norm on CPUs: a call of the compiled library for each step."""

from __future__ import annotations

import torch

from . import batch_norm, library
from .batch_norm import Merge, Normalised, Optional, Running
from .norms import Parameters


@batch_norm.channel_moments.on("cpu", when=lambda x, dtype, compiled: compiled and bool(x.numel()))
def _channel_moments(x: torch.Tensor, dtype: torch.dtype, compiled: bool) -> torch.Tensor:
    return library.moments(x, x.shape[1], x.shape[0])


@batch_norm.normalised_by_ranks.on("cpu", when=lambda *_, compiled: compiled)
def _normalised(
    x: torch.Tensor, moments: torch.Tensor, merge: Merge, eps: float, weight: Optional, bias: Optional,
    running: Running, compiled: bool,
) -> Normalised:  # fmt: skip
    given = Parameters(eps, weight, bias, *running, merge.correction)
    y, saved = library.batch_norm(x, moments, merge.shares(x.device, torch.float64), given)
    mean, rstd = saved.unbind()
    return Normalised(y, mean, rstd)


@batch_norm.channel_sums.on("cpu", when=lambda gy, *_, compiled: compiled and bool(gy.numel()))
def _channel_sums(
    gy: torch.Tensor, x: torch.Tensor, mean: torch.Tensor, rstd: torch.Tensor, compiled: bool
) -> torch.Tensor:
    return library.sums(gy, x, (mean, rstd), len(x))


@batch_norm.gradient_by_sums.on("cpu", when=lambda *_, compiled: compiled)
def _gradient(
    gy: torch.Tensor, x: torch.Tensor, mean: torch.Tensor, rstd: torch.Tensor, weight: Optional, sums: torch.Tensor,
    count: int, compiled: bool,
) -> torch.Tensor:  # fmt: skip
    return library.batch_norm_backward(gy, x, (mean, rstd), weight, sums, count)
