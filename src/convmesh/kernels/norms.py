"""What norms are made of, by the compiled library: of sets of numbers that lie one behind the other, none empty."""

from __future__ import annotations

import ctypes
from typing import NamedTuple

import torch

Pair = tuple[torch.Tensor, torch.Tensor]

_Int = ctypes.c_int64


class Linear(NamedTuple):
    """(x - mean) * by_input + gradient * by_gradient + added: numbers by set, and a gradient if there is one.

    Where there are fewer of them than sets, these take turns: a set may be a channel of one sample.
    """

    mean: torch.Tensor
    by_input: torch.Tensor
    added: torch.Tensor
    by_gradient: torch.Tensor | None = None


def moments(library: ctypes.CDLL, x: torch.Tensor, sets: int, threads: int) -> Pair:
    """Mean and variance."""
    mean, variance = x.new_empty(sets), x.new_empty(sets)
    _call(library, "moments", x, sets, x.numel() // sets, mean, variance, threads)
    return mean, variance


def sums(library: ctypes.CDLL, gradient: torch.Tensor, x: torch.Tensor, moments: Pair, threads: int) -> Pair:
    """Of the gradient, and of the gradient times the normalised input, by means and reciprocal deviations."""
    mean, rstd = moments
    plain, products = mean.new_empty(len(mean)), mean.new_empty(len(mean))
    sizes = (len(mean), x.numel() // len(mean))
    _call(library, "sums", gradient, x, *sizes, mean, rstd, plain, products, threads)
    return plain, products


def combined(
    library: ctypes.CDLL, x: torch.Tensor, gradient: torch.Tensor | None, linear: Linear, sets: int, threads: int
) -> torch.Tensor:
    """In new memory, and in the shape of `x`."""
    result, (mean, by_input, added, by_gradient) = torch.empty_like(x), linear
    sizes = (sets, x.numel() // sets, len(mean))
    _call(library, "combine", x, gradient, *sizes, mean, by_input, by_gradient, added, result, threads)
    return result


def _call(library: ctypes.CDLL, name: str, *arguments: torch.Tensor | int | None) -> None:
    dtype = next(each.dtype for each in arguments if isinstance(each, torch.Tensor))
    function = getattr(library, f"convmesh_{name}_{str(dtype).removeprefix('torch.')}")
    function(*(_Int(each) if isinstance(each, int) else _pointer(each) for each in arguments))


def _pointer(tensor: torch.Tensor | None) -> ctypes.c_void_p:
    return ctypes.c_void_p(None if tensor is None else tensor.data_ptr())


def agree_with_torch(library: ctypes.CDLL, dtype: torch.dtype) -> bool:
    """On sets that threads share, and far from zero."""
    x, g = 100 + torch.arange(2 * 3 * 9001, dtype=dtype, device="cpu").square_().sin_().view(2, 3, 9001)
    variance, mean = (each.to(dtype) for each in torch.var_mean(x.double(), 1, correction=0))
    rstd, linear = variance.rsqrt(), Linear(mean, variance, mean, variance)
    apart, of_gradient = (x - mean[:, None]).double(), (g * variance[:, None]).double()
    products, applied = g.double() * apart * rstd[:, None], apart * variance[:, None] + mean[:, None]
    found = (
        *moments(library, x, 3, 2),
        *sums(library, g, x, (mean, rstd), 2),
        combined(library, x, g, linear, 3, 2),
        combined(library, x, None, linear, 3, 2),
    )
    right = (mean, variance, g.double().sum(1), products.sum(1), applied + of_gradient, applied)
    # What rounding is relative to: sums of products are small beside their terms.
    terms = (mean, variance, g.double().sum(1), products.abs().sum(1), applied.abs() + of_gradient, applied.abs())
    few_roundings = 64 * torch.finfo(dtype).eps
    return all(bool(((a - b).abs() <= few_roundings * c).all()) for a, b, c in zip(found, right, terms, strict=True))
