"""The local computations of norms with torch's operators, in few passes over memory.

A set is the values that share one mean and variance. Any norm can use the operators of batch norm, with each set as a
channel. `compiled` says that all ranks have the compiled library, so that CPUs may use it (`normalization_cpu.py`).
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
    """Whether to use torch's batch norm: sets are contiguous, and no compiler would fuse plain operators."""
    return x.is_contiguous() and not _torch.tracing()


@Kernel
def moments_of_groups(x: torch.Tensor, groups: int, compiled: bool = True) -> Pair:
    """`[N C space] -> [N G] [N G]`: mean and variance of this rank's values; zeros without values."""
    if x.is_contiguous() or not x.numel():
        mean, var = moments_of_sets(x, x.shape[0] * groups, compiled)
        return mean.view(x.shape[0], groups), var.view(x.shape[0], groups)
    var, mean = torch.var_mean(x.unflatten(1, (groups, -1)), tuple(range(2, x.dim() + 1)), correction=0)
    return mean, var


@Kernel
def moments_of_sets(x: torch.Tensor, sets: int, compiled: bool = True) -> Pair:
    """Return mean and variance of each of `sets` equal parts of contiguous memory; zeros without values."""
    if not x.numel():
        return x.new_zeros(sets), x.new_zeros(sets)
    var, mean = torch.var_mean(x.view(sets, x.numel() // sets), 1, correction=0)
    return mean, var


@Kernel
def moments_of_channels(x: torch.Tensor, compiled: bool = True) -> Pair:
    """`[N C space] -> [C] [C]`: mean and variance of this rank's values; zeros without values."""
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
    """Return the normalised input as a new tensor.

    Moments, weight and bias have one shape: size 1 along the last dimensions, over which the values of a set extend.
    """
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
    """Return the sums of the gradient, and of the gradient times the normalised input, by set.

    They are taken over the last dimensions, where `mean` has size 1, and have its shape.
    """
    if not x.numel():
        return torch.zeros_like(mean), torch.zeros_like(mean)
    if not (gy.is_contiguous() and in_rows(x)):
        inner = [-1 - number for number, _ in enumerate(takewhile(lambda size: size == 1, reversed(mean.shape)))]
        return gy.sum(inner, keepdim=True), ((x - mean).mul_(rstd).mul_(gy)).sum(inner, keepdim=True)
    return sums_by_rows(gy, x, mean, rstd, x.numel() // mean.numel())


def sums_by_rows(gy: torch.Tensor, x: torch.Tensor, mean: torch.Tensor, rstd: torch.Tensor, row: int) -> Pair:
    """Do the same for contiguous sets, in partial sums of `row` values.

    One operator computes both sums in one pass, without a temporary of the input's size: they are the gradients of
    weight and bias in a batch norm of one sample, with each row as a channel.
    """
    sets, count = mean.numel(), x.numel() // mean.numel()
    gy, x = (t.view(1, -1, row) for t in (gy, x))
    saved = (numbers(t.reshape(sets, 1).expand(sets, count // row)) for t in (mean, rstd))
    products, plain = (t.view(sets, count // row).sum(1) if row < count else t for t in _sums(gy, x, *saved))
    return plain.view_as(mean), products.view_as(mean)


def _sums(gy: torch.Tensor, x: torch.Tensor, mean: torch.Tensor, rstd: torch.Tensor) -> Pair:
    """Return sums by channel: of the gradient times the normalised input, and of the gradient."""
    asked = [False, True, True]
    _, products, plain = aten.native_batch_norm_backward.default(gy, x, None, None, None, mean, rstd, True, 0.0, asked)
    return products, plain


def sums_of_channels(
    gy: torch.Tensor, x: torch.Tensor, mean: torch.Tensor, rstd: torch.Tensor, compiled: bool = True
) -> Pair:
    """`[N C space] [N C space] [C] [C] -> [C] [C]`: sums of the gradient, and of it times the normalised input."""
    if not x.numel():
        return torch.zeros_like(mean), torch.zeros_like(mean)
    return wide_sums_of_channels(gy.to(mean.dtype), x.to(mean.dtype), mean, rstd, compiled)


@Kernel
def wide_sums_of_channels(
    gy: torch.Tensor, x: torch.Tensor, mean: torch.Tensor, rstd: torch.Tensor, compiled: bool = True
) -> Pair:
    """Do the same for tensors of one dtype that are not empty."""
    products, plain = _sums(gy, x, mean, rstd)
    return plain, products


def input_gradient(
    gy: torch.Tensor, x: torch.Tensor, moments: Pair, means: Callable[[], Pair], weight: Any = None,
    compiled: bool = True,
) -> torch.Tensor:  # fmt: skip
    """Return the input's gradient, from the means of gradient and gradient times normalised input over all ranks.

    It is linear in gradient and input, with one set of coefficients for each set of values.
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
    """Return `(x - mean) * by + gy * by_gy + added`: a batch norm in evaluation, with each set as a channel."""
    if not x.numel():
        return torch.empty_like(x)
    coefficients = [numbers(t) for t in (by, added, mean, torch.ones_like(mean))]
    result: torch.Tensor = aten.native_batch_norm.default(by_set(x, mean), *coefficients, False, 0.0, 0.0)[0]
    return result.view(x.shape).addcmul_(gy, by_gy)


def by_set(x: torch.Tensor, mean: torch.Tensor) -> torch.Tensor:
    """Reshape to `[* set inner]`; sets are in the order of the means, which may repeat."""
    inner = prod(x.shape[x.dim() - mean.dim() :]) // mean.numel()
    return x.view(-1, mean.numel(), inner)


def numbers(each: torch.Tensor) -> torch.Tensor:
    """Return one number for each set, contiguous: some operators ignore strides, and `flatten` may keep them."""
    return each.reshape(-1).contiguous()
