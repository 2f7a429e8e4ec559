"""The windows of adaptive pooling, and their grouping into sets that are each one strided view."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import gcd

from .dependence import Dependence
from .interval import Interval


@dataclass(frozen=True)
class AdaptiveWindows(Dependence):
    """Target `t` reads sources from `floor(t * source_size / target_size)` up to the start of the next, rounded up.

    So neighbouring windows overlap by one source where the sizes do not divide.
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
    """Windows `i < count`: target `target + target_step * i` reads `length` sources from `start + step * i` on.

    Indices of targets and sources are local to the rank. `length <= step`, and the rank holds `count * step` sources
    from `start` on, so all the windows are one strided view. Over all ranks together each window has `full_length`
    sources.
    """

    target: int
    target_step: int
    start: int
    step: int
    count: int
    length: int
    full_length: int


def strided_windows(windows: AdaptiveWindows, sources: Interval, targets: Interval) -> tuple[StridedWindows, ...]:
    """Return what the windows of `targets` read of `sources`, in as few groups as possible."""
    common = gcd(windows.source_size, windows.target_size)
    # Windows repeat after `period` targets, which together take up `step` sources.
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
        """Yield one group, and a second one if the last window lacks a full step of sources after its start."""
        last = alike[-1]
        if sources.stop - max(windows.window(last).start, sources.start) >= step:
            yield group(alike[0], len(alike), step, length)
            return
        if len(alike) > 1:
            yield group(alike[0], len(alike) - 1, step, length)
        yield group(last, 1, length, length)

    return tuple(made for key, alike in found.items() for made in groups(alike, key[2]))
