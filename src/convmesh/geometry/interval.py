"""Half-open intervals of indices, and boxes of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Interval:
    """The indices `start <= i < stop`. Empty intervals with the same start are interchangeable."""

    start: int
    stop: int

    def __len__(self) -> int:
        return self.size

    @property
    def size(self) -> int:
        """The length. Unlike `len`, it also works for the symbolic integers of a compiler."""
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
    """Return the smallest interval that covers all of `intervals`."""
    filled = [i for i in intervals if i]
    if not filled:
        return Interval(0, 0)
    return Interval(min(i.start for i in filled), max(i.stop for i in filled))


def slabs(outer: Box, inner: Box) -> list[list[Box]]:
    """Return the border of `outer` around `inner` as disjoint boxes: per dimension, those before and after `inner`.

    The slabs of a dimension extend over `outer` along the dimensions before it, and over `inner` along those after it.
    So they need only the halos of the dimensions up to that one.
    """
    border: list[list[Box]] = []
    for dim, (side, core) in enumerate(zip(outer, inner, strict=True)):
        ends = [Interval(side.start, core.start), Interval(core.stop, side.stop)]
        around = [(*outer[:dim], end, *inner[dim + 1 :]) for end in ends]
        border.append([box for box in around if volume(box)])
    return border


def volume(box: Sequence[Interval]) -> int:
    """Return the number of points in a box."""
    result = 1
    for side in box:
        result *= side.size
    return result
