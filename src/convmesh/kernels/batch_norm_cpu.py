"""Batch norm with the compiled library, which needs one call for each step."""

from __future__ import annotations

import torch

from . import library, norms
from .batch_norm import Merge, Normalised, Optional, Running, Steps


def _channel_moments(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    if not x.numel():
        return x.new_zeros((1, 2, x.shape[1]))
    return norms.moments(library.existing(), x, x.shape[1], torch.get_num_threads(), x.shape[0])


def _normalised(
    x: torch.Tensor, moments: torch.Tensor, merge: Merge, eps: float, weight: Optional, bias: Optional,
    running: Running,
) -> Normalised:  # fmt: skip
    given = norms.Parameters(eps, weight, bias, *running, merge.correction)
    shares = merge.shares(x.device, torch.float64)
    return Normalised(*norms.batch_norm(library.existing(), x, moments, shares, given, torch.get_num_threads()))


def _channel_sums(gy: torch.Tensor, x: torch.Tensor, mean: torch.Tensor, rstd: torch.Tensor) -> torch.Tensor:
    if not gy.numel():
        return mean.new_zeros((2, mean.numel()))
    return norms.sums(library.existing(), gy, x, (mean, rstd), torch.get_num_threads(), x.shape[0])


def _gradient(
    gy: torch.Tensor, x: torch.Tensor, mean: torch.Tensor, rstd: torch.Tensor, weight: Optional, sums: torch.Tensor,
    count: int,
) -> torch.Tensor:  # fmt: skip
    moments, threads = (mean, rstd), torch.get_num_threads()
    return norms.batch_norm_backward(library.existing(), gy, x, moments, weight, sums, count, threads)


BY_LIBRARY = Steps(_channel_moments, _normalised, _channel_sums, _gradient)
