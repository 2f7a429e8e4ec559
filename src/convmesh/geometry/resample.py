"""Resampling: the sources of each target along one dimension, and their weights.

Coordinates and weights are rounded where torch rounds them: to single precision for all dtypes but float64, and always
for nearest. A rounding error in a coordinate would move a nearest neighbour by one index, so the arithmetic is the
same.
"""

from __future__ import annotations

import struct
from bisect import bisect_left, bisect_right
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from math import floor, pi, sin

from .dependence import Dependence
from .interval import Interval

Tap = tuple[int, float]
Weighted = tuple[Tap, ...]  # consecutive indices in ascending order, each with its weight


@dataclass(frozen=True)
class Taps(Dependence):
    """Target `t` is the weighted sum of the sources `at(t)`, whose first and last index never decrease with `t`.

    Nothing is stored per target: the sources of an interval follow from its ends, and its readers are found by
    bisection.
    """

    target_size: int
    at: Callable[[int], Weighted]

    def of(self, targets: Interval) -> list[Weighted]:
        return list(map(self.at, range(targets.start, targets.stop)))

    def reads(self, target: Interval) -> Interval:
        return Interval(self._start(target.start), self._stop(target.stop - 1)) if target else Interval(0, 0)

    def read_by(self, source: Interval) -> Interval:
        if not source:
            return Interval(0, 0)
        start = bisect_right(range(self.target_size), source.start, key=self._stop)
        return Interval(start, max(start, bisect_left(range(self.target_size), source.stop, key=self._start)))

    def _start(self, target: int) -> int:
        return self.at(target)[0][0]

    def _stop(self, target: int) -> int:
        return self.at(target)[-1][0] + 1


@dataclass(frozen=True)
class TransposedTaps(Dependence):
    """The backward map: each source is the weighted sum of the targets that read it, which may be none."""

    forward: Taps

    def of(self, sources: Interval) -> list[Weighted]:
        readers: list[list[Tap]] = [[] for _ in range(len(sources))]
        targets = self.forward.read_by(sources)
        for target in range(targets.start, targets.stop):
            for source, weight in self.forward.at(target):
                if source in sources:
                    readers[source - sources.start].append((target, weight))
        return list(map(tuple, readers))

    def reads(self, source: Interval) -> Interval:
        return self.forward.read_by(source)

    def read_by(self, target: Interval) -> Interval:
        return self.forward.reads(target)


def _single(value: float) -> float:
    rounded: float = struct.unpack("f", struct.pack("f", value))[0]
    return rounded


def _double(value: float) -> float:
    return value


@lru_cache(maxsize=1024)
def taps(mode: str, source: int, target: int, align_corners: bool, scale: float | None, double: bool) -> Taps:
    """Return the taps from `source` to `target` indices; `scale` is the user's factor, or None for the ratio of sizes.

    Some of torch's kernels for `nearest` ignore the scale and copy exactly if the size stays the same or doubles;
    `nearest_scaled` is what the other kernels do.
    """
    made = Taps(target, _taps_at(mode, source, target, align_corners, scale, _double if double else _single))
    made.at(target - 1)  # an overflow occurs for the last target first: so every rank raises, whichever targets it has
    return made


def _taps_at(
    mode: str, source: int, target: int, align_corners: bool, scale: float | None, rounded: Callable[[float], float]
) -> Callable[[int], Weighted]:
    if align_corners:
        step = rounded((source - 1) / (target - 1)) if target > 1 else 0.0
    else:
        step = rounded(1 / scale if scale is not None and scale > 0 else source / target)
    if mode.startswith("nearest"):
        return _nearest(mode, source, target, step)
    if mode != "cubic" and source == target:
        return lambda index: ((index, 1.0),)
    if mode in FILTERS:
        return _antialiased(mode, source, step, rounded)
    weights = _linear_weights if mode == "linear" else _cubic_weights

    def between(index: int) -> Weighted:
        """Weigh the sources around a target's coordinate by its distance from the one before it."""
        at = rounded(step * index) if align_corners else rounded(step * (index + 0.5) - 0.5)
        at = at if align_corners or mode == "cubic" else max(0.0, at)
        first = min(floor(_single(at)), source - 1)
        return weights(first, min(max(rounded(at - first), 0.0), 1.0), source)

    return between


def _nearest(mode: str, source: int, target: int, step: float) -> Callable[[int], Weighted]:
    def nearest(index: int) -> Weighted:
        if mode == "nearest_exact":
            return ((min(floor(_single((index + 0.5) * step)), source - 1), 1.0),)
        if mode == "nearest" and target in (source, 2 * source):
            return ((index * source // target, 1.0),)
        return ((min(floor(_single(index * step)), source - 1), 1.0),)

    return nearest


def _linear_weights(first: int, rest: float, source: int) -> Weighted:
    return ((first, 1 - rest), (first + 1, rest)) if first < source - 1 else ((first, 1.0),)


def _cubic_weights(first: int, rest: float, source: int) -> Weighted:
    """Indices beyond the border are clamped to it."""
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


# For each filter: its radius, and its value at a distance.
FILTERS: dict[str, tuple[int, Callable[[float], float]]] = {
    "linear_aa": (1, _triangle),
    "cubic_aa": (2, lambda x: _cubic(abs(x), -0.5)),
    "lanczos_aa": (3, _lanczos),
}


def _antialiased(mode: str, source: int, step: float, rounded: Callable[[float], float]) -> Callable[[int], Weighted]:
    """Return a filter that widens with the step between targets, clipped at the border and normalised to sum 1."""
    reach, weigh = FILTERS[mode]
    wide = max(step, 1.0)

    def filtered(index: int) -> Weighted:
        centre = rounded(step * (index + 0.5))
        start = max(int(rounded(centre - reach * wide + 0.5)), 0)
        stop = max(min(int(rounded(centre + reach * wide + 0.5)), source), start + 1)
        weights = [weigh(rounded((at - centre + 0.5) / wide)) for at in range(start, stop)]
        total = sum(weights)
        return tuple((at, weight / total) for at, weight in zip(range(start, stop), weights, strict=True))

    return filtered
