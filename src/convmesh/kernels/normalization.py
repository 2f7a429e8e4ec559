"""What a norm computes on one rank, by torch's operators, in few passes over memory.

A set is what one mean and one variance are taken of. The operators of one norm serve the others: every set as a channel
of a batch norm, which applies moments and sums up gradients. Where `compiled`, all ranks have the compiled library, and
a device that it is for may use it (`normalization_cpu.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import takewhile
from math import prod
from typing import Any

import torch

from .. import _torch
from .backend import Kernel

aten = torch.ops.aten

Pair = tuple[torch.Tensor, torch.Tensor]


def in_rows(x: torch.Tensor) -> bool:
    """Whether torch's batch norm is to apply moments, and to sum up gradients: a set is contiguous, and no compiler
    makes one pass of what is said plainly."""
    return x.is_contiguous() and not _torch.tracing()


@Kernel
def moments_of_groups(x: torch.Tensor, groups: int, compiled: bool = True) -> Pair:
    """[N C space] -> [N G] [N G]: mean and variance of a rank's own values; of no values, zeros."""
    if x.is_contiguous() or not x.numel():
        mean, var = moments_of_sets(x, x.shape[0] * groups, compiled)
        return mean.view(x.shape[0], groups), var.view(x.shape[0], groups)
    var, mean = torch.var_mean(x.unflatten(1, (groups, -1)), tuple(range(2, x.dim() + 1)), correction=0)
    return mean, var


@Kernel
def moments_of_sets(x: torch.Tensor, sets: int, compiled: bool = True) -> Pair:
    """Mean and variance of each of `sets` equal parts of contiguous memory; of no values, zeros."""
    if not x.numel():
        return x.new_zeros(sets), x.new_zeros(sets)
    var, mean = torch.var_mean(x.view(sets, x.numel() // sets), 1, correction=0)
    return mean, var


@Kernel
def moments_of_channels(x: torch.Tensor, compiled: bool = True) -> Pair:
    """[N C space] -> [C] [C]: mean and variance of a rank's own values; of no values, zeros."""
    if not x.numel():
        nothing = x.new_zeros(x.shape[1])
        return nothing, nothing
    if _torch.tracing():  # the operator below says nothing of symbols
        var, mean = torch.var_mean(x, (0, *range(2, x.dim())), correction=0)
        return mean, var
    mean, var = aten.batch_norm_update_stats.default(x, None, None, 0.0)
    return mean, var


@Kernel
def normalised(
    x: torch.Tensor, moments: Pair, eps: float, weight: torch.Tensor | None = None, bias: torch.Tensor | None = None,
    compiled: bool = True,
) -> torch.Tensor:  # fmt: skip
    """In new memory, with weight and bias, if any, in the shape of the moments: of size 1 along all of the last
    dimensions that a set has several values along."""
    mean, var = moments
    if not x.numel():
        return x
    if not in_rows(x):
        rstd = (var + eps).rsqrt()
        scaled = (x - mean).mul_(rstd if weight is None else rstd * weight)
        return scaled if bias is None else scaled.add_(bias)
    parameters = (None if t is None else numbers(t.expand_as(mean)) for t in (weight, bias))
    statistics = numbers(mean), numbers(var)
    result: torch.Tensor = aten.native_batch_norm.default(by_set(x, mean), *parameters, *statistics, False, 0.0, eps)[0]
    return result.view(x.shape)


@Kernel
def sums_by_set(
    gy: torch.Tensor, x: torch.Tensor, mean: torch.Tensor, rstd: torch.Tensor, compiled: bool = True
) -> Pair:
    """Sums of the gradient, and of the gradient times the normalised input, over the dimensions where `mean` has one
    index, all of which are the last. They are left with size 1."""
    if not x.numel():
        return torch.zeros_like(mean), torch.zeros_like(mean)
    if not (gy.is_contiguous() and in_rows(x)):
        inner = [-1 - number for number, _ in enumerate(takewhile(lambda size: size == 1, reversed(mean.shape)))]
        return gy.sum(inner, keepdim=True), ((x - mean).mul_(rstd).mul_(gy)).sum(inner, keepdim=True)
    return sums_by_rows(gy, x, mean, rstd, x.numel() // mean.numel())


def sums_by_rows(gy: torch.Tensor, x: torch.Tensor, mean: torch.Tensor, rstd: torch.Tensor, row: int) -> Pair:
    """Of sets that lie one behind the other, with sums of `row` values at first.

    One operator makes both sums in one pass, without anything of the input's size: they are the gradients of weight
    and bias in a batch norm of one sample, of which every row is a channel.
    """
    sets, count = mean.numel(), x.numel() // mean.numel()
    gy, x = (t.view(1, -1, row) for t in (gy, x))
    saved = (numbers(t.reshape(sets, 1).expand(sets, count // row)) for t in (mean, rstd))
    products, plain = (t.view(sets, count // row).sum(1) if row < count else t for t in _sums(gy, x, *saved))
    return plain.view_as(mean), products.view_as(mean)


def _sums(gy: torch.Tensor, x: torch.Tensor, mean: torch.Tensor, rstd: torch.Tensor) -> Pair:
    """By channel: of the gradient times the normalised input, and of the gradient."""
    asked = [False, True, True]
    _, products, plain = aten.native_batch_norm_backward.default(gy, x, None, None, None, mean, rstd, True, 0.0, asked)
    return products, plain


def sums_of_channels(
    gy: torch.Tensor, x: torch.Tensor, mean: torch.Tensor, rstd: torch.Tensor, compiled: bool = True
) -> Pair:
    """[N C space] [N C space] [C] [C] -> [C] [C]: of the gradient, and of the gradient times the normalised input."""
    if not x.numel():
        return torch.zeros_like(mean), torch.zeros_like(mean)
    return wide_sums_of_channels(gy.to(mean.dtype), x.to(mean.dtype), mean, rstd, compiled)


@Kernel
def wide_sums_of_channels(
    gy: torch.Tensor, x: torch.Tensor, mean: torch.Tensor, rstd: torch.Tensor, compiled: bool = True
) -> Pair:
    """The same of tensors of one type, none of them empty."""
    products, plain = _sums(gy, x, mean, rstd)
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
    if not in_rows(x):  # the gradient's own share is computed while the means are communicated
        result: torch.Tensor = gy * by_gradient
        plain, products = means()
        by_input = rstd.square() * products
        return result.addcmul_(x, by_input, value=-1).add_(by_input * mean - rstd * plain)
    plain, products = means()
    return combined(x, mean, -rstd.square() * products, -rstd * plain, gy, by_gradient, compiled)


@Kernel
def combined(
    x: torch.Tensor, mean: torch.Tensor, by: torch.Tensor, added: torch.Tensor, gy: torch.Tensor, by_gy: torch.Tensor,
    compiled: bool = True,
) -> torch.Tensor:  # fmt: skip
    """(x - mean) * by + gy * by_gy + added, in new memory: a batch norm in evaluation, with every set as a channel."""
    if not x.numel():
        return torch.empty_like(x)
    coefficients = [numbers(t) for t in (by, added, mean, torch.ones_like(mean))]
    result: torch.Tensor = aten.native_batch_norm.default(by_set(x, mean), *coefficients, False, 0.0, 0.0)[0]
    return result.view(x.shape).addcmul_(gy, by_gy)


def by_set(x: torch.Tensor, mean: torch.Tensor) -> torch.Tensor:
    """[* set inner], where sets are in the order of the means, and may repeat that order."""
    inner = prod(x.shape[x.dim() - mean.dim() :]) // mean.numel()
    return x.view(-1, mean.numel(), inner)


def numbers(each: torch.Tensor) -> torch.Tensor:
    """One number for each set, contiguous: some operators look at nothing but where the first one is, and one number
    that is expanded over all sets flattens to a view of itself."""
    return each.reshape(-1).contiguous()
