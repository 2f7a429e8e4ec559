"""Half-open intervals of indices, and boxes of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Interval:
    """The indices `start <= i < stop`. Every empty interval with the same start is as good as any other."""

    start: int
    stop: int

    def __len__(self) -> int:
        return self.size

    @property
    def size(self) -> int:
        """Its length, also where that is a symbol of a compiler: `len` makes a number of it."""
        return max(0, self.stop - self.start)

    def __bool__(self) -> bool:
        return bool(self.stop > self.start)

    def __and__(self, other: Interval) -> Interval:
        start = max(self.start, other.start)
        return Interval(start, max(start, min(self.stop, other.stop)))

    def __contains__(self, index: int) -> bool:
        return self.start <= index < self.stop

    def covers(self, other: Interval) -> bool:
        return not other or (self.start <= other.start and other.stop <= self.stop)

    def shift(self, by: int) -> Interval:
        return Interval(self.start + by, self.stop + by)


Box = tuple[Interval, ...]


def hull(intervals: Sequence[Interval]) -> Interval:
    """The smallest interval that covers all of `intervals`."""
    filled = [i for i in intervals if i]
    if not filled:
        return Interval(0, 0)
    return Interval(min(i.start for i in filled), max(i.stop for i in filled))


def slabs(outer: Box, inner: Box) -> list[list[Box]]:
    """The border of `outer` around `inner` as disjoint boxes, for each dimension those before and behind `inner`.

    A dimension's slabs are as wide as `outer` along the dimensions before it and as `inner` along those after it.
    So the slabs of a dimension need only the halos of the dimensions up to that one.
    """
    border: list[list[Box]] = []
    for dim, (side, core) in enumerate(zip(outer, inner, strict=True)):
        ends = [Interval(side.start, core.start), Interval(core.stop, side.stop)]
        around = [(*outer[:dim], end, *inner[dim + 1 :]) for end in ends]
        border.append([box for box in around if volume(box)])
    return border


def volume(box: Sequence[Interval]) -> int:
    """How many points a box has."""
    result = 1
    for side in box:
        result *= side.size
    return result
