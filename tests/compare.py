"""Comparing what ranks return: with one process up to rounding, and with each other."""

import math
from collections.abc import Sequence
from typing import Any

import torch

# How far two correct orders of summation may end up apart, relative to the greatest value. The unit roundoffs are
# 1.1e-16, 6.0e-8, 4.9e-4 and 3.9e-3. Sums in float32 and float64 have up to some 1e4 terms, whose errors add up like
# a random walk, by 1e2: that gives 1e-14 and 6e-6. float64 gets a wide margin because any real error, such as a wrong
# element at a border, is greater by far. The half formats accumulate in float32 and round a handful of times: 5 units.
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 2.5e-3, torch.bfloat16: 2e-2}
# Where nothing is added up, or a few terms, a value is compared with itself, but for what the terms lose of each other.
FEW_ROUNDINGS = 8


def assert_close(
    actual: torch.Tensor, expected: torch.Tensor, scale: float | None = None, elementwise: bool = False
) -> None:
    """Equal shapes, and values equal up to the rounding of the coarser dtype; integers and bools must be equal.

    `scale` is the size of the terms that were summed, for results that cancel to about zero; else it is the greatest
    finite magnitude in `expected`. With `elementwise` a value may differ by a part of itself only.
    """
    assert actual.shape == expected.shape, f"shape {tuple(actual.shape)}, expected {tuple(expected.shape)}"
    if actual.numel() == 0:
        return
    coarser = max(actual.dtype.to_real(), expected.dtype.to_real(), key=lambda dtype: TOLERANCE.get(dtype, 0.0))
    relative = TOLERANCE.get(coarser, 0.0)
    wide = torch.complex128 if actual.is_complex() or expected.is_complex() else torch.float64
    a, e = actual.detach().to(wide), expected.detach().to(wide)
    magnitude = e.abs()
    if scale is None:
        scale = magnitude[magnitude.isfinite()].max().item() if magnitude.isfinite().any() else 0.0
    allowed = torch.full_like(magnitude, relative * scale)
    if elementwise and relative:
        allowed = relative * magnitude.nan_to_num(0, 0, 0) + FEW_ROUNDINGS * torch.finfo(coarser).eps * scale
    # Where both are the same infinity or both NaN the subtraction gives NaN; one alone is infinitely far.
    agree = (a == e) | (a.isnan() & e.isnan())
    difference = torch.where(agree, 0.0, (a - e).abs().nan_to_num(nan=math.inf))
    beyond = difference - allowed
    place = tuple(int(index) for index in torch.unravel_index(beyond.argmax(), difference.shape))
    assert (beyond <= 0).all(), (
        f"difference {difference[place].item():.3g} at {place}: {a[place].item()!r}, expected {e[place].item()!r}; "
        f"allowed {allowed[place].item():.3g}, {relative:g} of {scale:.3g}; {int((beyond > 0).sum())} of {a.numel()} "
        f"are beyond it"
    )


def same_on_all_ranks(results: Sequence[Any]) -> Any:
    """The one result that all ranks returned, bit for bit; fails if they differ."""
    for position, result in enumerate(results):
        assert _identical(results[0], result), f"results 0 and {position} differ: {results[0]!r} and {result!r}"
    return results[0]


def _identical(a: Any, b: Any) -> bool:
    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and a.shape == b.shape and bool(((a == b) | ((a != a) & (b != b))).all())
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(_identical(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(_identical, a, b))
    return bool(a == b)
