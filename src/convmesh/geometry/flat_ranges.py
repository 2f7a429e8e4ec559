"""Flat element ranges as boxes of a 2-d table: for reshapes that merge a sharded dimension with outer and inner ones.

The table has one row per index of the outer dimensions. A rank that shards the middle dimension owns the same columns
of every row; a rank that shards the flattened dimension owns a range of element numbers, which is up to three boxes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from .interval import Box, Interval
from .shards import Shards


@dataclass(frozen=True)
class Stripes:
    """The elements of dimensions (outer, size, inner), with the middle one sharded: rank `r` owns `shards[r]` of it."""

    outer: int
    inner: int
    shards: Shards

    @property
    def row(self) -> int:
        """The length of a row: the elements per index of the outer dimension."""
        return self.shards.size * self.inner

    def stripe(self, rank: int) -> Interval:
        """Return the columns that a rank owns in every row."""
        part = self.shards[rank]
        return Interval(part.start * self.inner, part.stop * self.inner)

    def boxes(self, rank: int) -> tuple[Box, ...]:
        return ((Interval(0, self.outer), self.stripe(rank)),)

    def touching(self, box: Box) -> Iterable[int]:
        columns = box[1]
        return self.shards.touching(Interval(columns.start // self.inner, -(-columns.stop // self.inner)))


@dataclass(frozen=True)
class FlatRanges:
    """Elements of a table with rows of length `row`, sharded in flat order; `owned` counts runs of `inner` elements."""

    owned: Shards
    inner: int
    row: int

    def numbers(self, rank: int) -> Interval:
        part = self.owned[rank]
        return Interval(part.start * self.inner, part.stop * self.inner)

    def boxes(self, rank: int) -> tuple[Box, ...]:
        """Return up to three non-empty boxes, in order: the end of a row, full rows, the start of a row."""
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
