"""Elements numbered in a row, as boxes of a table: a sharded dimension with others outside and inside of it.

The table has a row for each index of the outer dimensions. A rank that shards the dimension in the middle has the same
columns of all rows; one that shards the outermost has a range of the numbers, which is up to three boxes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from .interval import Box, Interval
from .shards import Shards


@dataclass(frozen=True)
class Stripes:
    """Elements numbered over dimensions (outer, size, inner), of which rank `r` owns `parts[r]` of the middle one."""

    outer: int
    inner: int
    shards: Shards

    @property
    def row(self) -> int:
        """The elements of one index of the outer dimension."""
        return self.shards.size * self.inner

    def stripe(self, rank: int) -> Interval:
        """What a rank owns of every row."""
        part = self.shards[rank]
        return Interval(part.start * self.inner, part.stop * self.inner)

    def boxes(self, rank: int) -> tuple[Box, ...]:
        return ((Interval(0, self.outer), self.stripe(rank)),)

    def touching(self, box: Box) -> Iterable[int]:
        columns = box[1]
        return self.shards.touching(Interval(columns.start // self.inner, -(-columns.stop // self.inner)))


@dataclass(frozen=True)
class FlatRanges:
    """Ranges of the elements of a table with rows of length `row`; `owned` is in steps of `inner` elements."""

    owned: Shards
    inner: int
    row: int

    def numbers(self, rank: int) -> Interval:
        part = self.owned[rank]
        return Interval(part.start * self.inner, part.stop * self.inner)

    def boxes(self, rank: int) -> tuple[Box, ...]:
        """The end of a row, full rows, and the begin of one: those of them that are there, in their order."""
        numbers = self.numbers(rank)
        if not numbers:
            return ()
        first, last = numbers.start // self.row, (numbers.stop - 1) // self.row
        begin, end = numbers.start - first * self.row, numbers.stop - last * self.row
        if first == last:
            return ((Interval(first, first + 1), Interval(begin, end)),)
        middle = Interval(first + bool(begin), last + (end == self.row))
        boxes = (
            (Interval(first, middle.start), Interval(begin, self.row)),
            (middle, Interval(0, self.row)),
            (Interval(middle.stop, last + 1), Interval(0, end)),
        )
        return tuple(box for box in boxes if all(box))

    def touching(self, box: Box) -> Iterable[int]:
        rows, columns = box
        if not rows or not columns:
            return ()
        everything = self._owners(rows.start * self.row + columns.start, (rows.stop - 1) * self.row + columns.stop)
        if len(everything) <= len(rows):
            return everything
        starts = (row * self.row for row in range(rows.start, rows.stop))
        return sorted({rank for at in starts for rank in self._owners(at + columns.start, at + columns.stop)})

    def _owners(self, start: int, stop: int) -> Sequence[int]:
        return self.owned.touching(Interval(start // self.inner, (stop - 1) // self.inner + 1))
