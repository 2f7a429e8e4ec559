"""The local steps of batch norm, before and after the communication of statistics.

Forward and backward are two steps each, with a communication of 2 C numbers in between. Here they use torch's
operators; accelerators have fused kernels (`batch_norm_fused.py`). On CPUs the compiled library does each step in one
pass over memory, if all ranks have it and the tensors are contiguous and of one dtype (`batch_norm_cpu.py`).
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
    """How the moments of all ranks are merged: each rank's share of the values, and the number of values."""

    shares: Numbers
    alike: bool  # whether all shares are equal
    values: int
    owned: Numbers  # the number of values of each rank that has any
    owners: Numbers | None = None  # these ranks, if not all have some

    @property
    def correction(self) -> float:
        """Bessel's correction; NaN for one value, as in torch."""
        return nan if self.values == 1 else self.values / max(1, self.values - 1)


class Running(NamedTuple):
    """Running statistics, if any, which are updated in place."""

    mean: Optional
    var: Optional
    momentum: float


class Normalised(NamedTuple):
    output: torch.Tensor
    mean: torch.Tensor
    rstd: torch.Tensor


@Kernel
def channel_moments(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """`[N C space] -> [1 2 C]`: mean and variance of this rank's values, in this dtype; zeros without values."""
    return torch.stack(moments_of_channels(x.to(dtype), False)).unsqueeze(0)


@Kernel
def normalised_by_ranks(
    x: torch.Tensor, moments: torch.Tensor, merge: Merge, eps: float, weight: Optional, bias: Optional,
    running: Running,
) -> Normalised:  # fmt: skip
    """`[N C space] [rank 2 C] -> [N C space] [C] [C]`: output, mean and rstd, from the moments of all ranks."""
    mean, var = _merged(moments, merge)
    if running.mean is not None:
        running.mean.lerp_(mean.to(running.mean.dtype), running.momentum)
    if running.var is not None:
        running.var.lerp_((var * merge.correction).to(running.var.dtype), running.momentum)
    return Normalised(normalised_by_statistics(x, mean, var, eps, weight, bias), mean, (var + eps).rsqrt_())


def _merged(moments: torch.Tensor, merge: Merge) -> Pair:
    """Merge moments about the common mean, which avoids cancellation."""
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
    """`[N C space] -> [N C space]`. For inputs in half precision, parameters are used in float32."""
    if not x.numel():
        return x.clone()
    weight, bias = (t if t is None else t.to(mean.dtype) for t in (weight, bias))
    result: torch.Tensor = aten.native_batch_norm.default(x, weight, bias, mean, var, False, 0.0, eps)[0]
    return result


@Kernel
def channel_sums(gy: torch.Tensor, x: torch.Tensor, mean: torch.Tensor, rstd: torch.Tensor) -> torch.Tensor:
    """`[N C space] [N C space] [C] [C] -> [2 C]`: sums of gradient times normalised input, and of the gradient."""
    plain, products = sums_of_channels(gy, x, mean, rstd, False)
    return torch.stack([products, plain])


@Kernel
def gradient_by_sums(
    gy: torch.Tensor, x: torch.Tensor, mean: torch.Tensor, rstd: torch.Tensor, weight: Optional, sums: torch.Tensor,
    count: int,
) -> torch.Tensor:  # fmt: skip
    """Return the input's gradient from the sums over all ranks: linear in gradient and input, for each channel."""

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
    """An implementation of the four steps."""

    channel_moments: Callable[[torch.Tensor, torch.dtype], torch.Tensor]
    normalised_by_ranks: Callable[[torch.Tensor, torch.Tensor, Merge, float, Optional, Optional, Running], Normalised]
    channel_sums: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
    gradient_by_sums: Callable[
        [torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, Optional, torch.Tensor, int], torch.Tensor
    ]


BY_OPERATORS = Steps(channel_moments, normalised_by_ranks, channel_sums, gradient_by_sums)
