"""The windows of adaptive pooling, and groups of equal ones at equal distances, each of which is a strided view."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import gcd

from .dependence import Dependence
from .interval import Interval


@dataclass(frozen=True)
class AdaptiveWindows(Dependence):
    """Target `t` reads the sources from `t * source_size // target_size` up to the start of the next one, rounded up.

    So windows overlap by one source where the sizes do not divide.
    """

    source_size: int
    target_size: int

    def window(self, target: int) -> Interval:
        return self.reads(Interval(target, target + 1))

    def reads(self, target: Interval) -> Interval:
        if not target:
            return Interval(0, 0)
        start, stop = target.start * self.source_size, target.stop * self.source_size
        return Interval(start // self.target_size, -(-stop // self.target_size))

    def read_by(self, source: Interval) -> Interval:
        if not source:
            return Interval(0, 0)
        start, stop = source.start * self.target_size, source.stop * self.target_size
        return Interval(start // self.source_size, -(-stop // self.source_size))


@dataclass(frozen=True)
class StridedWindows:
    """Windows number `i < count`: target `target + target_step * i` reads `length` sources from `start + step * i` on.

    Targets and sources count from the first that the rank has. `length <= step`, and `count * step` sources from
    `start` on are there, so all the windows are one view. On all ranks together a window has `full_length` sources.
    """

    target: int
    target_step: int
    start: int
    step: int
    count: int
    length: int
    full_length: int


def strided_windows(windows: AdaptiveWindows, sources: Interval, targets: Interval) -> tuple[StridedWindows, ...]:
    """What the windows of `targets` read of `sources`, in as few groups as there are kinds of windows."""
    common = gcd(windows.source_size, windows.target_size)
    # Windows so many targets apart are alike: `period` of them take up `step` sources.
    period, step = windows.target_size // common, windows.source_size // common
    found: dict[tuple[int, int, int], list[int]] = {}
    for target in range(targets.start, targets.stop):
        here = windows.window(target) & sources
        key = (target % period, here.start - target // period * step, len(here))
        if here:
            found.setdefault(key, []).append(target)

    def group(first: int, count: int, step: int, length: int) -> StridedWindows:
        window = windows.window(first)
        start = max(window.start, sources.start) - sources.start
        return StridedWindows(first - targets.start, period, start, step, count, length, len(window))

    def groups(alike: list[int], length: int) -> Iterator[StridedWindows]:
        """One, and one more for a last window that has no room for a full step behind it."""
        last = alike[-1]
        if sources.stop - max(windows.window(last).start, sources.start) >= step:
            yield group(alike[0], len(alike), step, length)
            return
        if len(alike) > 1:
            yield group(alike[0], len(alike) - 1, step, length)
        yield group(last, 1, length, length)

    return tuple(made for key, alike in found.items() for made in groups(alike, key[2]))
