"""Batch norm on one rank: what it adds to the statistics of all ranks, and what it makes of them.

Each way is a pair of steps with a communication of 2 C numbers in between. By torch's operators here, or by kernels of
an accelerator (`batch_norm_fused.py`). Where all ranks have the compiled library, and the tensors are contiguous and of
one type, it does each step in one pass over memory and one call (`batch_norm_cpu.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from math import nan
from typing import NamedTuple

import torch

from .backend import Kernel
from .normalization import Pair, combined, in_rows, moments_of_channels, sums_of_channels

aten = torch.ops.aten

Optional = torch.Tensor | None
Numbers = Callable[[torch.device, torch.dtype], torch.Tensor]


class Merge(NamedTuple):
    """How moments of all ranks are merged: the share of the values that each has, and how many there are."""

    shares: Numbers
    alike: bool  # all of them
    values: int
    owned: Numbers  # how many values each rank has that has any
    owners: Numbers | None = None  # these ranks, if not all have some

    @property
    def correction(self) -> float:
        """Of a variance of all values, for one of a sample; one value has none, as torch has it."""
        return nan if self.values == 1 else self.values / max(1, self.values - 1)


class Running(NamedTuple):
    """Running statistics, to be moved towards the new ones in place, if there are any."""

    mean: Optional
    var: Optional
    momentum: float


class Normalised(NamedTuple):
    output: torch.Tensor
    mean: torch.Tensor
    rstd: torch.Tensor


@Kernel
def channel_moments(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """[N C space] -> [1 2 C]: means and variances of a rank's own values, in this type; of no values, zeros."""
    return torch.stack(moments_of_channels(x.to(dtype), False)).unsqueeze(0)


@Kernel
def normalised_by_ranks(
    x: torch.Tensor, moments: torch.Tensor, merge: Merge, eps: float, weight: Optional, bias: Optional,
    running: Running,
) -> Normalised:  # fmt: skip
    """[N C space] and the moments of all ranks [rank 2 C] -> [N C space], and the mean and reciprocal deviation."""
    mean, var = _merged(moments, merge)
    if running.mean is not None:
        running.mean.lerp_(mean.to(running.mean.dtype), running.momentum)
    if running.var is not None:
        running.var.lerp_((var * merge.correction).to(running.var.dtype), running.momentum)
    return Normalised(normalised_by_statistics(x, mean, var, eps, weight, bias), mean, (var + eps).rsqrt_())


def _merged(moments: torch.Tensor, merge: Merge) -> Pair:
    """About the common mean: nothing large is subtracted from something large."""
    if len(moments) == 1:
        mean, var = moments[0].unbind()
        return mean, var
    means, variances = moments.unbind(1)
    if merge.alike:
        apart, mean = torch.var_mean(means, 0, correction=0)
        return mean, apart.add_(variances.mean(0))
    shares = merge.shares(means.device, means.dtype).view(-1, 1)
    mean = (shares * means).sum(0)
    return mean, (means - mean).square_().add_(variances).mul_(shares).sum(0)


def normalised_by_statistics(
    x: torch.Tensor, mean: torch.Tensor, var: torch.Tensor, eps: float, weight: Optional, bias: Optional
) -> torch.Tensor:
    """[N C space] -> [N C space]. Half precision inputs take parameters in float32."""
    if not x.numel():
        return x.clone()
    weight, bias = (t if t is None else t.to(mean.dtype) for t in (weight, bias))
    result: torch.Tensor = aten.native_batch_norm.default(x, weight, bias, mean, var, False, 0.0, eps)[0]
    return result


@Kernel
def channel_sums(gy: torch.Tensor, x: torch.Tensor, mean: torch.Tensor, rstd: torch.Tensor) -> torch.Tensor:
    """[N C space] [N C space] [C] [C] -> [2 C]: of the gradient times the normalised input, and of the gradient."""
    plain, products = sums_of_channels(gy, x, mean, rstd, False)
    return torch.stack([products, plain])


@Kernel
def gradient_by_sums(
    gy: torch.Tensor, x: torch.Tensor, mean: torch.Tensor, rstd: torch.Tensor, weight: Optional, sums: torch.Tensor,
    count: int,
) -> torch.Tensor:  # fmt: skip
    """That of the input, from the sums of all ranks: a linear function of gradient and input for every channel."""

    def by_channel(numbers: torch.Tensor) -> torch.Tensor:
        return numbers.view(-1, *[1] * (x.dim() - 2))

    scale = rstd if weight is None else rstd * weight
    products, plain = (sums * (-1 / max(1, count))).unbind()
    by_input, added = (scale * rstd).mul_(products), scale * plain
    if in_rows(x):
        coefficients = by_channel(mean), by_channel(by_input), by_channel(added)
        return combined(x, *coefficients, gy, by_channel(scale), False)
    result: torch.Tensor = gy * by_channel(scale)
    return result.addcmul_(x, by_channel(by_input)).add_(by_channel(added - by_input * mean))


class Steps(NamedTuple):
    """One way to do it."""

    channel_moments: Callable[[torch.Tensor, torch.dtype], torch.Tensor]
    normalised_by_ranks: Callable[[torch.Tensor, torch.Tensor, Merge, float, Optional, Optional, Running], Normalised]
    channel_sums: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
    gradient_by_sums: Callable[
        [torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, Optional, torch.Tensor, int], torch.Tensor
    ]


BY_OPERATORS = Steps(channel_moments, normalised_by_ranks, channel_sums, gradient_by_sums)
