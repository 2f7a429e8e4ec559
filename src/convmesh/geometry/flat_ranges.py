"""Parts of elements in a row that are not in one piece: of a cut dimension with others outside and inside of it."""

from __future__ import annotations

from dataclasses import dataclass

from .interval import Interval


@dataclass(frozen=True)
class Stripes:
    """Elements numbered over dimensions (outer, size, inner), of which rank `r` owns `parts[r]` of the middle one.

    The number of an element never falls along what a rank owns, so what lies in a range of numbers is a range of it.
    """

    outer: int
    size: int
    inner: int
    parts: tuple[Interval, ...]

    @property
    def row(self) -> int:
        """The elements of one index of the outer dimension."""
        return self.size * self.inner

    def stripe(self, rank: int) -> Interval:
        """What a rank owns of every row."""
        part = self.parts[rank]
        return Interval(part.start * self.inner, part.stop * self.inner)

    def count_before(self, rank: int, number: int) -> int:
        """How many of a rank's elements have a lower number."""
        row, rest = divmod(number, max(1, self.row))
        stripe = self.stripe(rank)
        return row * len(stripe) + min(max(rest - stripe.start, 0), len(stripe))

    def within(self, rank: int, numbers: Interval) -> Interval:
        """Which of a rank's elements, counted from its first, have these numbers."""
        return Interval(self.count_before(rank, numbers.start), self.count_before(rank, numbers.stop))

    def rows(self, numbers: Interval) -> Interval:
        """The rows from the first to the last that have any of these numbers."""
        return Interval(numbers.start // max(1, self.row), -(-numbers.stop // max(1, self.row)))
