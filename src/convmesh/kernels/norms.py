"""The parts of norms that the compiled library computes, for contiguous sets of numbers that are not empty."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache
from typing import NamedTuple

import torch

Pair = tuple[torch.Tensor, torch.Tensor]


class Linear(NamedTuple):
    """`(x - mean) * by_input + gradient * by_gradient + added`, with one number of each per set; gradient optional.

    If there are fewer numbers than sets, they repeat: a set may be a channel of one sample.
    """

    mean: torch.Tensor
    by_input: torch.Tensor
    added: torch.Tensor
    by_gradient: torch.Tensor | None = None


class Parameters(NamedTuple):
    """Parameters of a batch norm, by channel or None; running statistics are updated in place."""

    eps: float
    weight: torch.Tensor | None = None
    bias: torch.Tensor | None = None
    running_mean: torch.Tensor | None = None
    running_var: torch.Tensor | None = None
    momentum: float = 0.0
    correction: float = 1.0  # of the variance, for the running one


def moments(library: ctypes.CDLL, x: torch.Tensor, sets: int, threads: int, samples: int = 1) -> torch.Tensor:
    """Return mean and variance, `[1 2 set]`. Each sample has a part of each set."""
    found = x.new_empty((1, 2, sets))
    at, step = found.data_ptr(), sets * found.element_size()
    _call(
        library, "moments", x.dtype, x.data_ptr(), samples, sets, x.numel() // (samples * sets), at, at + step, threads
    )
    return found


def sums(
    library: ctypes.CDLL, gradient: torch.Tensor, x: torch.Tensor, moments: Pair, threads: int, samples: int = 1
) -> torch.Tensor:
    """Return sums by set, `[2 set]`: of the gradient times the normalised input, and of the gradient."""
    mean, rstd = moments
    sets = mean.numel()
    found = mean.new_empty((2, sets))
    at, step = found.data_ptr(), sets * found.element_size()
    sizes = samples, sets, x.numel() // (samples * sets)
    pointers = mean.data_ptr(), rstd.data_ptr(), at + step, at
    _call(library, "sums", x.dtype, gradient.data_ptr(), x.data_ptr(), *sizes, *pointers, threads)
    return found


def combined(
    library: ctypes.CDLL, x: torch.Tensor, gradient: torch.Tensor | None, linear: Linear, sets: int, threads: int
) -> torch.Tensor:
    """Return the linear function as a new tensor of the shape of `x`."""
    result, (mean, by_input, added, by_gradient) = torch.empty_like(x), linear
    sizes = (sets, x.numel() // sets, len(mean))
    pointers = map(_pointer, (mean, by_input, by_gradient, added, result))
    _call(library, "combine", x.dtype, x.data_ptr(), _pointer(gradient), *sizes, *pointers, threads)
    return result


def batch_norm(
    library: ctypes.CDLL, x: torch.Tensor, moments: torch.Tensor, shares: torch.Tensor, given: Parameters, threads: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return output, mean and reciprocal deviation, from the moments of all ranks `[rank 2 set]` and their shares."""
    samples, sets = x.shape[:2]
    result, saved = torch.empty_like(x), x.new_empty((2, sets))
    eps, weight, bias, running_mean, running_var, momentum, correction = given
    _call(
        library, "batch_norm", x.dtype, x.data_ptr(), samples, sets, x.numel() // max(1, samples * sets),
        moments.data_ptr(), shares.data_ptr(), shares.shape[0], eps, _pointer(weight), _pointer(bias),
        _pointer(running_mean), _pointer(running_var), momentum, correction, saved.data_ptr(), result.data_ptr(),
        threads,
    )  # fmt: skip
    mean, rstd = saved.unbind()
    return result, mean, rstd


def batch_norm_backward(
    library: ctypes.CDLL, gradient: torch.Tensor, x: torch.Tensor, moments: Pair, weight: torch.Tensor | None,
    sums: torch.Tensor, count: int, threads: int,
) -> torch.Tensor:  # fmt: skip
    """Return the input's gradient, from the sums over all ranks `[2 set]` and the number of values."""
    (samples, sets), (mean, rstd) = x.shape[:2], moments
    result = torch.empty_like(x)
    _call(
        library, "batch_norm_backward", x.dtype, gradient.data_ptr(), x.data_ptr(), samples, sets,
        x.numel() // max(1, samples * sets), mean.data_ptr(), rstd.data_ptr(), _pointer(weight), sums.data_ptr(),
        max(1, count), result.data_ptr(), threads,
    )  # fmt: skip
    return result


# A letter for each argument: a pointer, an integer, a number.
ARGUMENTS = {
    "moments": "piiippi", "sums": "ppiiippppi", "combine": "ppiiipppppi", "batch_norm": "piiippidppppddppi",
    "batch_norm_backward": "ppiiippppdpi",
}  # fmt: skip
_TYPES = {"p": ctypes.c_void_p, "i": ctypes.c_int64, "d": ctypes.c_double}


def _call(library: ctypes.CDLL, name: str, dtype: torch.dtype, *arguments: float | None) -> None:
    _function(library, name, dtype)(*arguments)


@cache
def _function(library: ctypes.CDLL, name: str, dtype: torch.dtype) -> Callable[..., None]:
    function = getattr(library, f"convmesh_{name}_{str(dtype).removeprefix('torch.')}")
    function.argtypes, function.restype = [_TYPES[letter] for letter in ARGUMENTS[name]], None
    return function  # type: ignore[no-any-return]


def _pointer(tensor: torch.Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def agree_with_torch(library: ctypes.CDLL, dtype: torch.dtype) -> bool:
    """Whether the library agrees with torch, on sets that threads share, and on values far from zero."""
    x, g = 100 + torch.arange(2 * 3 * 9001, dtype=dtype, device="cpu").square_().sin_().view(2, 3, 9001)
    variance, mean = (each.to(dtype) for each in torch.var_mean(x.double(), 1, correction=0))
    rstd, linear = variance.rsqrt(), Linear(mean, variance, mean, variance)
    apart, of_gradient = (x - mean[:, None]).double(), (g * variance[:, None]).double()
    products, applied = g.double() * apart * rstd[:, None], apart * variance[:, None] + mean[:, None]
    found = (
        *moments(library, x, 3, 2)[0],
        *reversed(sums(library, g, x, (mean, rstd), 2)),
        combined(library, x, g, linear, 3, 2),
        combined(library, x, None, linear, 3, 2),
    )
    right = (mean, variance, g.double().sum(1), products.sum(1), applied + of_gradient, applied)
    # What rounding is relative to: sums of products are small beside their terms.
    terms = (mean, variance, g.double().sum(1), products.abs().sum(1), applied.abs() + of_gradient, applied.abs())
    few_roundings = 64 * torch.finfo(dtype).eps
    return all(bool(((a - b).abs() <= few_roundings * c).all()) for a, b, c in zip(found, right, terms, strict=True))
