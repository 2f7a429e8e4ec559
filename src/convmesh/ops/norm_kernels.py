"""What a norm computes on one rank, in as few passes over memory as torch's kernels permit.

A set is what one mean and one variance are taken of. Kernels of one norm serve the others: every set as a group of a
group norm, which finds moments, or as a channel of a batch norm, which applies them.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import takewhile
from math import prod
from typing import Any

import torch

from .. import _torch

aten = torch.ops.aten

Pair = tuple[torch.Tensor, torch.Tensor]

IN_CACHE = 1 << 18  # elements
LONG = 64  # values of a set; for shorter ones a kernel spends its time between them


def moments_of_groups(x: torch.Tensor, groups: int) -> Pair:
    """[N C space] -> [N G] [N G]: mean and variance of a rank's own values; of no values, zeros."""
    if not x.numel():
        nothing = x.new_zeros(x.shape[0], groups)
        return nothing, nothing
    if not x.is_cpu:
        var, mean = torch.var_mean(x.unflatten(1, (groups, -1)), tuple(range(2, x.dim() + 1)), correction=0)
        return mean, var
    # Of torch's kernels for CPUs, that of group norm is by far the fastest to find moments, though it also normalises.
    # It takes some groups at a time, as samples of one group: what it writes stays in the cache, and `x` as well.
    sets = x.shape[0] * groups
    some = max(1, IN_CACHE * sets // x.numel())
    if x.is_contiguous() and some < sets and not _torch.tracing():
        parts = [_kernel_moments(part, 1) for part in x.view(sets, 1, -1).split(some)]
        mean, rstd = (torch.cat(numbers).view(-1, groups) for numbers in zip(*parts, strict=True))
    else:
        mean, rstd = _kernel_moments(x, groups)
    return mean, rstd.pow_(-2).sub_(torch.finfo(x.dtype).tiny).clamp_(min=0)


def _kernel_moments(x: torch.Tensor, groups: int) -> Pair:
    """Mean and reciprocal deviation. What is added to a variance, which may be zero, is less than it can tell."""
    sizes = (x.shape[0], x.shape[1], prod(x.shape[2:]))
    _, mean, rstd = aten.native_group_norm.default(x, None, None, *sizes, groups, torch.finfo(x.dtype).tiny)
    return mean, rstd


def moments_of_rows(x: torch.Tensor, inner: int) -> Pair:
    """[rows, inner dimensions] -> [rows 1 1 ...] [rows 1 1 ...], of the last `inner` dimensions."""
    outer = x.shape[: x.dim() - inner]
    flat = x.reshape(1, prod(outer), prod(x.shape[x.dim() - inner :]))
    mean, var = moments_of_groups(flat, flat.shape[1]) if flat.shape[1] else (x.new_zeros(0), x.new_zeros(0))
    shape = (*outer, *[1] * inner)
    return mean.view(shape), var.view(shape)


def moments_of_channels(x: torch.Tensor) -> Pair:
    """[N C space] -> [C] [C]: mean and variance of a rank's own values; of no values, zeros."""
    if not x.numel():
        nothing = x.new_zeros(x.shape[1])
        return nothing, nothing
    if not x.is_cpu or not x.is_contiguous() or prod(x.shape[2:]) < LONG:
        mean, var = aten.batch_norm_update_stats.default(x, None, None, 0.0)
        return mean, var
    # The kernel of batch norm takes four times as long as that of group norm, which has its moments by sample.
    means, variances = moments_of_groups(x, x.shape[1])
    mean = means.mean(0)
    return mean, variances.add_((means - mean).square_()).mean(0)


def normalised(
    x: torch.Tensor, moments: Pair, eps: float, weight: torch.Tensor | None = None, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """In new memory, with weight and bias, if any, in the shape of the moments: of size 1 along all of the last
    dimensions that a set has several values along."""
    mean, var = moments
    if not x.numel():
        return x
    if not x.is_contiguous():
        rstd = (var + eps).rsqrt()
        scaled = (x - mean).mul_(rstd if weight is None else rstd * weight)
        return scaled if bias is None else scaled.add_(bias)
    sets = mean.numel()
    by_set = [None if t is None else t.expand_as(mean).reshape(sets) for t in (weight, bias, mean, var)]
    flat = x.view(1, sets, x.numel() // sets)
    result: torch.Tensor = aten.native_batch_norm.default(flat, *by_set, False, 0.0, eps)[0]
    return result.view(x.shape)


def sums_by_set(gy: torch.Tensor, x: torch.Tensor, mean: torch.Tensor, rstd: torch.Tensor) -> Pair:
    """Sums of the gradient, and of the gradient times the normalised input, over the dimensions where `mean` has one
    index, all of which are the last. They are left with size 1."""
    if not x.numel():
        return torch.zeros_like(mean), torch.zeros_like(mean)
    if not (gy.is_contiguous() and x.is_contiguous()):
        inner = [-1 - number for number, _ in enumerate(takewhile(lambda size: size == 1, reversed(mean.shape)))]
        return gy.sum(inner, keepdim=True), ((x - mean).mul_(rstd).mul_(gy)).sum(inner, keepdim=True)
    # One kernel makes both sums in one pass, without anything of the input's size: they are the gradients of weight
    # and bias in a batch norm of one sample, of which every set is a channel.
    sets = mean.numel()
    gy, x = (t.view(1, sets, t.numel() // sets) for t in (gy, x))
    saved = (mean.reshape(sets), rstd.reshape(sets))
    asked = [False, True, True]
    _, products, plain = aten.native_batch_norm_backward.default(gy, x, None, None, None, *saved, True, 0.0, asked)
    return plain.view_as(mean), products.view_as(mean)


def input_gradient(
    gy: torch.Tensor, x: torch.Tensor, moments: Pair, means: Callable[[], Pair], weight: Any = None
) -> torch.Tensor:
    """In new memory, from the means over all ranks of the gradient, and of the gradient times the normalised input.

    It is a linear function of gradient and input, with one set of coefficients for each set of moments. Of these the
    gradient's own is known before the means are there.
    """
    mean, rstd = moments
    result = gy * (rstd if weight is None else rstd * weight)
    plain, products = means()
    by_input = -rstd.square() * products
    return result.addcmul_(x, by_input).sub_(by_input * mean + rstd * plain)
