"""Half-open intervals of indices, boxes of them, and how DTensor shards a dimension into them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise


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


def _chunk(interval: Interval, parts: int) -> list[Interval]:
    """`torch.chunk`: equal parts, rounded up, so that the last ones may hold less, or nothing."""
    step = -((interval.start - interval.stop) // parts)
    bounds = [min(interval.start + step * r, interval.stop) for r in range(parts + 1)]
    return [Interval(a, b) for a, b in pairwise(bounds)]


def shards(size: int, mesh_sizes: tuple[int, ...]) -> tuple[Interval, ...]:
    """Who owns what of a dimension that is sharded over mesh dimensions of these sizes, the first one outermost.

    The ranks are in row-major order over the mesh dimensions, which is the order of what they own.
    """
    return _shards(size, mesh_sizes) if type(size) is int else _chunks(size, mesh_sizes)


def _chunks(size: int, mesh_sizes: tuple[int, ...]) -> tuple[Interval, ...]:
    owned = [Interval(0, size)]
    for parts in mesh_sizes:
        owned = [chunk for interval in owned for chunk in _chunk(interval, parts)]
    return tuple(owned)


_shards = lru_cache(maxsize=4096)(_chunks)


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
