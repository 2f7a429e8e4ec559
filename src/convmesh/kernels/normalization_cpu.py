"""The local computations of norms on CPUs: with the compiled library if all ranks have it (`compiled`).

Otherwise with torch's operators, on parts that stay in the cache. Group norm is by far the fastest of these for
moments.
"""

from __future__ import annotations

from functools import lru_cache
from math import nan, prod

import torch

from .. import _torch
from . import library, normalization
from .normalization import Pair, by_set, numbers, sums_by_rows
from .norms import Linear

IN_CACHE = 1 << 18  # elements
ROW = 1 << 10  # elements that stay in the fastest cache while an operator goes over them twice
LONG = 64  # values of a set; for shorter ones an operator spends its time between them


def _takes(*tensors: torch.Tensor) -> bool:
    """Whether the compiled library supports the call: contiguous tensors of one dtype."""
    dense = all(tensor.is_contiguous() for tensor in tensors) and tensors[0].numel() > 0
    return dense and not _torch.tracing() and all(map(library.takes, tensors)) and len({t.dtype for t in tensors}) == 1


@normalization.moments_of_groups.on("cpu", when=lambda x, *_, **__: not x.is_contiguous() and bool(x.numel()))
def _moments_of_groups(x: torch.Tensor, groups: int, compiled: bool = True) -> Pair:
    mean, rstd = _group_norm(x, groups)
    return mean, _variance(rstd)


@normalization.moments_of_sets.on("cpu", when=lambda x, *_, **__: bool(x.numel()) and not _torch.tracing())
def _moments_of_sets(x: torch.Tensor, sets: int, compiled: bool = True) -> Pair:
    count = x.numel() // sets
    if compiled and _takes(x):
        mean, var = library.moments(x, sets)[0]
        return mean, var.masked_fill_(var.isinf(), nan)  # torch's kernels for these norms have no such number
    row = _row(count, ROW)
    # Some rows at a time, as samples of one group: what the operator writes stays in the cache, and so does the row
    # that it reads twice.
    parts = [_group_norm(part, 1) for part in x.view(-1, 1, row).split(max(1, IN_CACHE // row))]
    mean, rstd = (torch.cat(each).view(sets, count // row) for each in zip(*parts, strict=True))
    return _moments_of_equals(mean, _variance(rstd), 1)


@lru_cache(maxsize=1024)
def _row(count: int, most: int) -> int:
    """Return how many values to take moments of at once: a divisor of `count`, which is `count` if none is good."""
    return next((row for row in range(min(most, count), most // 4, -1) if count % row == 0), count)


def _group_norm(x: torch.Tensor, groups: int) -> Pair:
    """Return mean and reciprocal deviation. The smallest normal number is added to the variance, which may be zero."""
    sizes = (x.shape[0], x.shape[1], prod(x.shape[2:]))
    tiny = torch.finfo(x.dtype).tiny
    _, mean, rstd = torch.ops.aten.native_group_norm.default(x, None, None, *sizes, groups, tiny)
    return mean, rstd


def _variance(rstd: torch.Tensor) -> torch.Tensor:
    return rstd.pow_(-2).sub_(torch.finfo(rstd.dtype).tiny).clamp_(min=0)


def _moments_of_equals(means: torch.Tensor, variances: torch.Tensor, dim: int) -> Pair:
    """Merge moments of equally many values along `dim`, about the common mean."""
    if means.shape[dim] == 1:
        return means.squeeze(dim), variances.squeeze(dim)
    mean = means.mean(dim, keepdim=True)
    return mean.squeeze(dim), (means - mean).square_().add_(variances).mean(dim)


def _has_long_channels(x: torch.Tensor, compiled: bool = True) -> bool:
    """Whether channels are so long that group norm, with moments by sample, needs a fourth of batch norm's time."""
    return bool(x.numel()) and not _torch.tracing() and x.is_contiguous() and prod(x.shape[2:]) >= LONG


@normalization.moments_of_channels.on("cpu", when=_has_long_channels)
def _moments_of_channels(x: torch.Tensor, compiled: bool = True) -> Pair:
    if compiled and _takes(x):
        mean, var = library.moments(x, x.shape[1], x.shape[0])[0]
        return mean, var
    mean, var = (t.view(x.shape[:2]) for t in normalization.moments_of_groups(x, x.shape[1], compiled))
    return _moments_of_equals(mean, var, 0)


def _can_normalise(
    x: torch.Tensor, moments: Pair, eps: float, weight: torch.Tensor | None = None, bias: torch.Tensor | None = None,
    compiled: bool = True,
) -> bool:  # fmt: skip
    return compiled and _takes(x)


@normalization.normalised.on("cpu", when=_can_normalise)
def _normalised(
    x: torch.Tensor, moments: Pair, eps: float, weight: torch.Tensor | None = None, bias: torch.Tensor | None = None,
    compiled: bool = True,
) -> torch.Tensor:  # fmt: skip
    mean, var = moments
    rstd = (var + eps).rsqrt_()
    scale = rstd if weight is None else rstd.mul_(weight.expand_as(mean))
    shift = torch.zeros_like(mean) if bias is None else bias.expand_as(mean)
    return _linear(x, None, mean, scale, shift)


@normalization.combined.on("cpu", when=lambda x, mean, by, added, gy, by_gy, compiled=True: compiled and _takes(gy, x))
def _combined(
    x: torch.Tensor, mean: torch.Tensor, by: torch.Tensor, added: torch.Tensor, gy: torch.Tensor, by_gy: torch.Tensor,
    compiled: bool = True,
) -> torch.Tensor:  # fmt: skip
    return _linear(x, gy, mean, by, added, by_gy)


def _linear(x: torch.Tensor, gy: torch.Tensor | None, mean: torch.Tensor, *coefficients: torch.Tensor) -> torch.Tensor:
    sets = prod(by_set(x, mean).shape[:2])
    return library.combined(x, gy, Linear(*(numbers(t).to(x.dtype) for t in (mean, *coefficients))), sets)


@normalization.sums_by_set.on("cpu", when=lambda gy, x, mean, rstd, compiled=True: compiled and _takes(gy, x))
def _compiled_sums(
    gy: torch.Tensor, x: torch.Tensor, mean: torch.Tensor, rstd: torch.Tensor, compiled: bool = True
) -> Pair:
    products, plain = library.sums(gy, x, (numbers(mean).to(x.dtype), numbers(rstd).to(x.dtype)))
    return plain.view_as(mean), products.view_as(mean)


def _is_large(gy: torch.Tensor, x: torch.Tensor, *_: object, **__: object) -> bool:
    """Whether to split: the operator reads a channel twice, which is faster if the channel stays in the first cache."""
    return x.numel() > IN_CACHE and gy.is_contiguous() and x.is_contiguous() and not _torch.tracing()


@normalization.sums_by_set.on("cpu", when=_is_large)
def _sums_by_set(
    gy: torch.Tensor, x: torch.Tensor, mean: torch.Tensor, rstd: torch.Tensor, compiled: bool = True
) -> Pair:
    return sums_by_rows(gy, x, mean, rstd, _row(x.numel() // mean.numel(), ROW))


def _pays_by_sample(
    gy: torch.Tensor, x: torch.Tensor, mean: torch.Tensor, rstd: torch.Tensor, compiled: bool = True
) -> bool:
    large = x.numel() > IN_CACHE and prod(x.shape[2:]) >= LONG and not _torch.tracing()
    return large and x.is_contiguous() and gy.is_contiguous()


@normalization.wide_sums_of_channels.on("cpu", when=lambda gy, x, mean, rstd, compiled=True: compiled and _takes(gy, x))
def _compiled_sums_of_channels(
    gy: torch.Tensor, x: torch.Tensor, mean: torch.Tensor, rstd: torch.Tensor, compiled: bool = True
) -> Pair:
    products, plain = library.sums(gy, x, (mean, rstd), len(x))
    return plain, products


@normalization.wide_sums_of_channels.on("cpu", when=_pays_by_sample)
def _sums_of_channels(
    gy: torch.Tensor, x: torch.Tensor, mean: torch.Tensor, rstd: torch.Tensor, compiled: bool = True
) -> Pair:
    """Sum by sample first, in parts that stay in the first cache."""

    def by_sample(each: torch.Tensor) -> torch.Tensor:
        return each.view(1, -1, *[1] * (x.dim() - 2)).expand(len(x), *[-1] * (x.dim() - 1))

    sums = normalization.sums_by_set(gy, x, by_sample(mean), by_sample(rstd), compiled)
    plain, products = (t.sum(0).view(-1) for t in sums)
    return plain, products
