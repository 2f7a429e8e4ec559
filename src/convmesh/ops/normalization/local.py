"""What a norm computes on one rank, in as few passes over memory as there can be.

A set is what one mean and one variance are taken of. On CPUs compiled kernels do it, where they can, and where all
ranks have them (`compiled`). Of torch's, those of one norm serve the others: every set as a group of a group norm,
which finds moments, or as a channel of a batch norm, which applies them.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from itertools import takewhile
from math import nan, prod
from typing import Any

import torch

from ... import _torch, kernels

aten = torch.ops.aten

Pair = tuple[torch.Tensor, torch.Tensor]

IN_CACHE = 1 << 18  # elements
ROW = 1 << 10  # elements that stay in the fastest cache while a kernel goes over them twice
LONG = 64  # values of a set; for shorter ones a kernel spends its time between them


def moments_of_groups(x: torch.Tensor, groups: int, compiled: bool = True) -> Pair:
    """[N C space] -> [N G] [N G]: mean and variance of a rank's own values; of no values, zeros."""
    if x.is_contiguous() or not x.numel():
        mean, var = moments_of_sets(x, x.shape[0] * groups, compiled)
        return mean.view(x.shape[0], groups), var.view(x.shape[0], groups)
    if not x.is_cpu:
        var, mean = torch.var_mean(x.unflatten(1, (groups, -1)), tuple(range(2, x.dim() + 1)), correction=0)
        return mean, var
    mean, rstd = _kernel_moments(x, groups)
    return mean, _variance(rstd)


def moments_of_sets(x: torch.Tensor, sets: int, compiled: bool = True) -> Pair:
    """Mean and variance of each of `sets` equal parts of contiguous memory; of no values, zeros."""
    if not x.numel():
        return x.new_zeros(sets), x.new_zeros(sets)
    count = x.numel() // sets
    if not x.is_cpu:
        var, mean = torch.var_mean(x.view(sets, count), 1, correction=0)
        return mean, var
    if _torch.tracing():
        mean, rstd = _kernel_moments(x.view(sets, 1, count), 1)
        return mean.view(sets), _variance(rstd).view(sets)
    if compiled and _compiled_for(x):
        mean, var = kernels.moments(x, sets)
        return mean, var.masked_fill_(var.isinf(), nan)  # torch's kernels for these norms have no such number
    row = _row(count, ROW)
    # Some rows at a time, as samples of one group: what the kernel writes stays in the cache, and so does the row that
    # it reads twice.
    parts = [_kernel_moments(part, 1) for part in x.view(-1, 1, row).split(max(1, IN_CACHE // row))]
    mean, rstd = (torch.cat(numbers).view(sets, count // row) for numbers in zip(*parts, strict=True))
    return _moments_of_equals(mean, _variance(rstd), 1)


def _compiled_for(*tensors: torch.Tensor) -> bool:
    """Whether the compiled kernels take them: numbers one behind the other, of one kind."""
    dense = all(tensor.is_contiguous() for tensor in tensors) and tensors[0].numel() > 0
    return dense and not _torch.tracing() and all(map(kernels.takes, tensors)) and len({t.dtype for t in tensors}) == 1


@lru_cache(maxsize=1024)
def _row(count: int, most: int) -> int:
    """How many of a set's values to take moments of at once, before these are merged; all where they cut badly."""
    return next((row for row in range(min(most, count), most // 4, -1) if count % row == 0), count)


def _kernel_moments(x: torch.Tensor, groups: int) -> Pair:
    """Mean and reciprocal deviation: of torch's kernels for CPUs, that of group norm is by far the fastest to find
    them, though it also normalises.

    What is added to a variance, which may be zero, is less than it can tell.
    """
    sizes = (x.shape[0], x.shape[1], prod(x.shape[2:]))
    _, mean, rstd = aten.native_group_norm.default(x, None, None, *sizes, groups, torch.finfo(x.dtype).tiny)
    return mean, rstd


def _variance(rstd: torch.Tensor) -> torch.Tensor:
    return rstd.pow_(-2).sub_(torch.finfo(rstd.dtype).tiny).clamp_(min=0)


def _moments_of_equals(means: torch.Tensor, variances: torch.Tensor, dim: int) -> Pair:
    """Moments of all values from those of equally many along `dim`, about the common mean."""
    if means.shape[dim] == 1:
        return means.squeeze(dim), variances.squeeze(dim)
    mean = means.mean(dim, keepdim=True)
    return mean.squeeze(dim), (means - mean).square_().add_(variances).mean(dim)


def moments_of_channels(x: torch.Tensor, compiled: bool = True) -> Pair:
    """[N C space] -> [C] [C]: mean and variance of a rank's own values; of no values, zeros."""
    if not x.numel():
        nothing = x.new_zeros(x.shape[1])
        return nothing, nothing
    if _torch.has_symbols(tuple(x.shape)):  # the kernels below do not tell a compiler what they make of these
        var, mean = torch.var_mean(x, (0, *range(2, x.dim())), correction=0)
        return mean, var
    if not x.is_cpu or not x.is_contiguous() or prod(x.shape[2:]) < LONG:
        mean, var = aten.batch_norm_update_stats.default(x, None, None, 0.0)
        return mean, var
    # The kernel of batch norm takes four times as long as that of group norm, which has its moments by sample.
    if compiled and _compiled_for(x):
        by_sample = kernels.moments(x, x.shape[0] * x.shape[1])
    else:
        by_sample = moments_of_groups(x, x.shape[1], compiled)
    mean, var = (t.view(x.shape[:2]) for t in by_sample)
    return _moments_of_equals(mean, var, 0)


def normalised(
    x: torch.Tensor, moments: Pair, eps: float, weight: torch.Tensor | None = None, bias: torch.Tensor | None = None,
    compiled: bool = True,
) -> torch.Tensor:  # fmt: skip
    """In new memory, with weight and bias, if any, in the shape of the moments: of size 1 along all of the last
    dimensions that a set has several values along."""
    mean, var = moments
    if not x.numel():
        return x
    if not x.is_contiguous():
        rstd = (var + eps).rsqrt()
        scaled = (x - mean).mul_(rstd if weight is None else rstd * weight)
        return scaled if bias is None else scaled.add_(bias)
    weight, bias = (None if t is None else t.expand_as(mean) for t in (weight, bias))
    if compiled and _compiled_for(x):
        rstd = (var + eps).rsqrt_()
        scale, shift = rstd if weight is None else rstd.mul_(weight), torch.zeros_like(mean) if bias is None else bias
        return _combined(x, mean, scale, shift)
    by_set = [None if t is None else _numbers(t) for t in (weight, bias, mean, var)]
    result: torch.Tensor = aten.native_batch_norm.default(_by_set(x, mean), *by_set, False, 0.0, eps)[0]
    return result.view(x.shape)


def _by_set(x: torch.Tensor, mean: torch.Tensor) -> torch.Tensor:
    """[* set inner], where sets lie as the means do, and may take turns with them."""
    inner = prod(x.shape[x.dim() - mean.dim() :]) // mean.numel()
    return x.view(-1, mean.numel(), inner)


def _combined(
    x: torch.Tensor, mean: torch.Tensor, by: torch.Tensor, added: torch.Tensor, gy: Any = None, by_gy: Any = None
) -> torch.Tensor:
    """(x - mean) * by + gy * by_gy + added, by a compiled kernel."""
    sets = prod(_by_set(x, mean).shape[:2])
    given = (mean, by, added) if gy is None else (mean, by, added, by_gy)
    return kernels.combined(x, gy, kernels.Linear(*(_numbers(t).to(x.dtype) for t in given)), sets)


def _numbers(by_set: torch.Tensor) -> torch.Tensor:
    """One number for each set, side by side in memory: some kernels look at nothing but where the first one is, and
    one number that is expanded over all sets flattens to a view of itself."""
    return by_set.reshape(-1).contiguous()


def sums_by_set(
    gy: torch.Tensor, x: torch.Tensor, mean: torch.Tensor, rstd: torch.Tensor, compiled: bool = True
) -> Pair:
    """Sums of the gradient, and of the gradient times the normalised input, over the dimensions where `mean` has one
    index, all of which are the last. They are left with size 1."""
    if not x.numel():
        return torch.zeros_like(mean), torch.zeros_like(mean)
    if not (gy.is_contiguous() and x.is_contiguous()):
        inner = [-1 - number for number, _ in enumerate(takewhile(lambda size: size == 1, reversed(mean.shape)))]
        return gy.sum(inner, keepdim=True), ((x - mean).mul_(rstd).mul_(gy)).sum(inner, keepdim=True)
    if compiled and _compiled_for(gy, x):
        plain, products = kernels.sums(gy, x, (_numbers(mean).to(x.dtype), _numbers(rstd).to(x.dtype)))
        return plain.view_as(mean), products.view_as(mean)
    # One kernel makes both sums in one pass, without anything of the input's size: they are the gradients of weight
    # and bias in a batch norm of one sample, of which every set is a channel.
    sets, count = mean.numel(), x.numel() // mean.numel()
    # It goes over a channel twice, and is faster where the channel stays in the fastest cache.
    row = _row(count, ROW) if x.is_cpu and x.numel() > IN_CACHE and not _torch.tracing() else count
    gy, x = (t.view(1, -1, row) for t in (gy, x))
    saved = (_numbers(t.reshape(sets, 1).expand(sets, count // row)) for t in (mean, rstd))
    asked = [False, True, True]
    _, *sums = aten.native_batch_norm_backward.default(gy, x, None, None, None, *saved, True, 0.0, asked)
    products, plain = (t.view(sets, count // row).sum(1) if row < count else t for t in sums)
    return plain.view_as(mean), products.view_as(mean)


def sums_of_channels(
    gy: torch.Tensor, x: torch.Tensor, mean: torch.Tensor, rstd: torch.Tensor, compiled: bool = True
) -> Pair:
    """[N C space] [N C space] [C] [C] -> [C] [C]: of the gradient, and of the gradient times the normalised input."""
    if not x.numel():
        return torch.zeros_like(mean), torch.zeros_like(mean)
    gy, x = gy.to(mean.dtype), x.to(mean.dtype)
    large = x.is_cpu and x.numel() > IN_CACHE and prod(x.shape[2:]) >= LONG
    if (compiled and _compiled_for(gy, x)) or (large and x.is_contiguous() and gy.is_contiguous()):
        # By sample first, and by parts of it that stay in the fastest cache.
        by_sample = [t.view(1, -1, *[1] * (x.dim() - 2)).expand(len(x), *[-1] * (x.dim() - 1)) for t in (mean, rstd)]
        plain, products = (t.sum(0).view(-1) for t in sums_by_set(gy, x, by_sample[0], by_sample[1], compiled))
        return plain, products
    asked = [False, True, True]
    _, products, plain = aten.native_batch_norm_backward.default(gy, x, None, None, None, mean, rstd, True, 0.0, asked)
    return plain, products


def input_gradient(
    gy: torch.Tensor, x: torch.Tensor, moments: Pair, means: Callable[[], Pair], weight: Any = None,
    compiled: bool = True,
) -> torch.Tensor:  # fmt: skip
    """In new memory, from the means over all ranks of the gradient, and of the gradient times the normalised input.

    It is a linear function of gradient and input, with one set of coefficients for each set of moments.
    """
    mean, rstd = moments
    by_gradient = rstd if weight is None else rstd * weight
    if not x.is_contiguous():  # the gradient's own share is computed while the means travel
        result: torch.Tensor = gy * by_gradient
        plain, products = means()
        by_input = rstd.square() * products
        return result.addcmul_(x, by_input, value=-1).add_(by_input * mean - rstd * plain)
    plain, products = means()
    by_input, added = -rstd.square() * products, -rstd * plain
    if compiled and _compiled_for(gy, x):
        return _combined(x, mean, by_input, added, gy, by_gradient)
    if not x.numel():
        return torch.empty_like(x)
    # A batch norm in evaluation, with every set as a channel.
    by_set = [_numbers(t) for t in (by_input, added, mean, torch.ones_like(mean))]
    result = aten.native_batch_norm.default(_by_set(x, mean), *by_set, False, 0.0, 0.0)[0]
    return result.view(x.shape).addcmul_(gy, by_gradient)
