"""Resampling: which sources each target is made of along one dimension, and with which weights.

The numbers are rounded where torch rounds them: single precision for all dtypes but float64, and for nearest always.
A hair's breadth in a coordinate moves nearest neighbours by a whole index, so this has to be the same arithmetic.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from math import floor, pi, sin

from .dependence import Runs

Tap = tuple[int, float]


@dataclass(frozen=True)
class Taps:
    """For every target the sources that it reads, in rising order, each with its weight."""

    of: tuple[tuple[Tap, ...], ...]

    def transposed(self, source_size: int) -> Taps:
        """For every source the targets that read it: the map of gradients."""
        readers: list[list[Tap]] = [[] for _ in range(source_size)]
        for target, taps in enumerate(self.of):
            for source, weight in taps:
                readers[source].append((target, weight))
        return Taps(tuple(tuple(taps) for taps in readers))

    @property
    def trivial(self) -> bool:
        """Every target is its own source. (The caller knows that there are as many of both.)"""
        return all(taps == ((target, 1.0),) for target, taps in enumerate(self.of))

    @property
    def runs(self) -> Runs:
        # A target that reads nothing has an empty run where the one before it ends.
        stops = tuple(accumulate((taps[-1][0] + 1 if taps else 0 for taps in self.of), max))
        starts = tuple(taps[0][0] if taps else stop for taps, stop in zip(self.of, stops, strict=True))
        return Runs(_never_falling(starts), stops)


def _never_falling(starts: tuple[int, ...]) -> tuple[int, ...]:
    """The lowest start of a target and all that follow it."""
    return tuple(accumulate(reversed(starts), min))[::-1]


def _single(value: float) -> float:
    rounded: float = struct.unpack("f", struct.pack("f", value))[0]
    return rounded


def _double(value: float) -> float:
    return value


@lru_cache(maxsize=1024)
def taps(mode: str, source: int, target: int, align_corners: bool, scale: float | None, double: bool) -> Taps:
    """From `source` to `target` indices. `scale` is a user's factor; without one the sizes give it.

    Of torch's kernels for `nearest` some take the same size, and twice the size, for exact whatever the scale is;
    `nearest_scaled` is what the others do.
    """
    rounded = _double if double else _single
    if mode.startswith("nearest"):
        return _nearest(mode, source, target, scale, rounded)
    if align_corners:
        step = rounded((source - 1) / (target - 1)) if target > 1 else 0.0
    else:
        step = rounded(1 / scale if scale is not None and scale > 0 else source / target)
    if mode != "cubic" and source == target:
        return Taps(tuple(((index, 1.0),) for index in range(target)))
    if mode in FILTERS:
        return _antialiased(mode, source, target, step, rounded)

    def place(index: int) -> tuple[int, float]:
        """Between which sources a target lies, and how far from the first of them."""
        at = rounded(step * index) if align_corners else rounded(step * (index + 0.5) - 0.5)
        at = at if align_corners or mode == "cubic" else max(0.0, at)
        first = min(floor(_single(at)), source - 1)
        return first, min(max(rounded(at - first), 0.0), 1.0)

    weights = _linear_weights if mode == "linear" else _cubic_weights
    return Taps(tuple(weights(*place(index), source) for index in range(target)))


def _nearest(mode: str, source: int, target: int, scale: float | None, rounded: Callable[[float], float]) -> Taps:
    step = rounded(1 / scale if scale is not None and scale > 0 else source / target)

    def place(index: int) -> int:
        if mode == "nearest_exact":
            return min(floor(_single((index + 0.5) * step)), source - 1)
        if mode == "nearest" and target in (source, 2 * source):
            return index * source // target
        return min(floor(_single(index * step)), source - 1)

    return Taps(tuple(((place(index), 1.0),) for index in range(target)))


def _linear_weights(first: int, rest: float, source: int) -> tuple[Tap, ...]:
    return ((first, 1 - rest), (first + 1, rest)) if first < source - 1 else ((first, 1.0),)


def _cubic_weights(first: int, rest: float, source: int) -> tuple[Tap, ...]:
    """Indices beyond the border are those at the border."""
    found: dict[int, float] = {}
    for tap in range(-1, 3):
        index = min(max(first + tap, 0), source - 1)
        found[index] = found.get(index, 0.0) + _cubic(abs(rest - tap), -0.75)
    return tuple(sorted(found.items()))


def _cubic(x: float, a: float) -> float:
    if x <= 1:
        return ((a + 2) * x - (a + 3)) * x * x + 1
    return ((a * x - 5 * a) * x + 8 * a) * x - 4 * a if x < 2 else 0.0


def _triangle(x: float) -> float:
    return max(0.0, 1 - abs(x))


def _lanczos(x: float) -> float:
    if x == 0 or abs(x) >= 3:
        return float(x == 0)
    return 3 * sin(pi * x) * sin(pi * x / 3) / (pi * x) ** 2


# How far a filter reaches, and its value at a distance.
FILTERS: dict[str, tuple[int, Callable[[float], float]]] = {
    "linear_aa": (1, _triangle),
    "cubic_aa": (2, lambda x: _cubic(abs(x), -0.5)),
    "lanczos_aa": (3, _lanczos),
}


def _antialiased(mode: str, source: int, target: int, step: float, rounded: Callable[[float], float]) -> Taps:
    """A filter that widens with the distance of the targets, cut off at the border and brought to sum 1."""
    reach, weigh = FILTERS[mode]
    wide = max(step, 1.0)
    made = []
    for index in range(target):
        centre = rounded(step * (index + 0.5))
        start = max(int(rounded(centre - reach * wide + 0.5)), 0)
        stop = max(min(int(rounded(centre + reach * wide + 0.5)), source), start + 1)
        weights = [weigh(rounded((at - centre + 0.5) / wide)) for at in range(start, stop)]
        total = sum(weights)
        made.append(tuple((at, weight / total) for at, weight in zip(range(start, stop), weights, strict=True)))
    return Taps(tuple(made))
