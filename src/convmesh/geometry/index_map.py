"""Index maps: which input index each output index copies, as strided pieces (pad, slice, concatenate, flip, roll)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

from .interval import Interval
from .moves import Parts


@dataclass(frozen=True, slots=True)
class Piece:
    """Outputs `out_start + out_step * j` copy inputs `in_start + in_step * j` of one source, for `0 <= j < count`.

    `out_step` is positive. `in_step` may be negative, or 0 where one input is repeated.
    """

    count: int
    out_start: int
    in_start: int
    out_step: int = 1
    in_step: int = 1
    source: int = 0

    def within(self, out: Interval) -> Piece:
        """Return the part of the piece whose outputs are in `out`."""
        first = max(0, -(-(out.start - self.out_start) // self.out_step))
        last = min(self.count, -(-(out.stop - self.out_start) // self.out_step))
        return self._subrange(first, last)

    def copying(self, source: Interval) -> Piece:
        """Return the part of the piece whose inputs are in `source`."""
        return self._subrange(*self._copied_range(source))

    def read_by(self, source: Interval) -> Interval:
        """Return the outputs that copy any of `source`, plus one before and one after them."""
        first, last = self._copied_range(source)
        first, last = max(0, first - 1), min(last + 1, self.count)
        return Interval(self.out_start + self.out_step * first, self.out_start + self.out_step * (last - 1) + 1)

    def _copied_range(self, source: Interval) -> tuple[int, int]:
        first, last = 0, self.count
        if self.in_step > 0:
            first = max(first, -(-(source.start - self.in_start) // self.in_step))
            last = min(last, -(-(source.stop - self.in_start) // self.in_step))
        elif self.in_step < 0:
            first = max(first, (self.in_start - source.stop) // -self.in_step + 1)
            last = min(last, (self.in_start - source.start) // -self.in_step + 1)
        elif self.in_start not in source:
            last = 0
        return first, last

    def _subrange(self, first: int, last: int) -> Piece:
        return Piece(
            max(0, last - first), self.out_start + self.out_step * first, self.in_start + self.in_step * first,
            self.out_step, self.in_step, self.source,
        )  # fmt: skip

    @property
    def writes(self) -> Interval:
        """The range from the first to the last output that it writes."""
        return Interval(self.out_start, self.out_start + self.out_step * (self.count - 1) + 1)

    @property
    def reads(self) -> Interval:
        """The range from the first to the last input that it copies."""
        if not self.count:
            return Interval(0, 0)
        end = self.in_start + self.in_step * (self.count - 1)
        return Interval(min(self.in_start, end), max(self.in_start, end) + 1)


@dataclass(frozen=True)
class IndexMap:
    """An output dimension of `size` indices.

    Indices that no piece writes are filled; where pieces overlap the last wins.
    """

    size: int
    pieces: tuple[Piece, ...]

    def within(self, out: Interval) -> tuple[Piece, ...]:
        clipped = (piece.within(out) for piece in self.pieces)
        return tuple(piece for piece in clipped if piece.count)

    def reads(self, out: Interval, source: int = 0) -> Parts:
        """Return what `out` needs of a source: ascending intervals that neither overlap nor touch."""
        return _merged([piece.reads for piece in self.within(out) if piece.source == source])

    def read_by(self, part: Interval, source: int = 0) -> Parts:
        """Return the outputs that copy any of a part of a source, one range per piece; a range may include others."""
        return tuple(piece.read_by(part) for piece in self.pieces if piece.source == source)

    def gaps(self, out: Interval) -> Parts:
        """Return intervals that contain every output of `out` that copies nothing, and possibly other outputs."""
        dense = (piece.writes for piece in self.within(out) if piece.out_step == 1 or piece.count == 1)
        gaps, start = [], out.start
        for written in (*_merged(list(dense)), Interval(out.stop, out.stop)):
            gaps.append(Interval(start, written.start))
            start = written.stop
        return tuple(gap for gap in gaps if gap)

    @cached_property
    def disjoint(self) -> bool:
        """Whether the output ranges of all pieces are disjoint, so that they may be written in any order."""
        written = sorted((piece.writes for piece in self.pieces), key=lambda interval: interval.start)
        return all(not one & other for one, other in pairwise(written))


def _merged(intervals: Sequence[Interval]) -> Parts:
    merged: list[Interval] = []
    for interval in sorted(intervals, key=lambda interval: interval.start):
        if merged and interval.start <= merged[-1].stop:
            merged[-1] = Interval(merged[-1].start, max(merged[-1].stop, interval.stop))
        else:
            merged.append(interval)
    return tuple(merged)


def concatenation(pieces: Sequence[tuple[int, int, int]], before: int = 0, after: int = 0) -> IndexMap:
    """Concatenate pieces (count, in_start, in_step), with `before` and `after` filled outputs around them."""
    placed, start = [], before
    for count, in_start, in_step in pieces:
        placed.append(Piece(count, start, in_start, in_step=in_step))
        start += count
    return IndexMap(start + after, tuple(piece for piece in placed if piece.count))


def constant_pad(size: int, before: int, after: int) -> IndexMap:
    """Map of a constant padding; negative padding crops."""
    kept = size + min(0, before) + min(0, after)
    return concatenation([(kept, max(0, -before), 1)], max(0, before), max(0, after))


def reflection_pad(size: int, before: int, after: int) -> IndexMap:
    kept, start = _kept_range(size, before, after)
    return concatenation([(max(0, before), before, -1), (kept, start, 1), (max(0, after), size - 2, -1)])


def replication_pad(size: int, before: int, after: int) -> IndexMap:
    kept, start = _kept_range(size, before, after)
    return concatenation([(max(0, before), 0, 0), (kept, start, 1), (max(0, after), size - 1, 0)])


def _kept_range(size: int, before: int, after: int) -> tuple[int, int]:
    """Return how many inputs are kept and the index of the first; negative padding crops."""
    start = max(0, -before)
    return max(0, size + min(0, before) + min(0, after)), start


def strided(count: int, start: int, step: int) -> IndexMap:
    """Map of a slice."""
    return concatenation([(count, start, step)])


def slice_backward(size: int, count: int, start: int, step: int) -> IndexMap:
    """Map of a slice's backward: put its elements back in their places and fill the other outputs."""
    return IndexMap(size, (Piece(count, start, 0, out_step=step),) if count else ())


def slice_scatter(size: int, count: int, start: int, step: int) -> IndexMap:
    """Map that copies source 0 and replaces a slice of it with source 1."""
    over = (Piece(count, start, 0, out_step=step, source=1),) if count else ()
    if step == 1:  # the elements to be replaced need not be read
        kept = (Piece(start, 0, 0), Piece(size - start - count, start + count, start + count))
        return IndexMap(size, (*(piece for piece in kept if piece.count), *over))
    return IndexMap(size, (Piece(size, 0, 0), *over))


def flipped(size: int) -> IndexMap:
    return concatenation([(size, size - 1, -1)])


def rolled(size: int, shift: int) -> IndexMap:
    shift = shift % size if size else 0
    return concatenation([(shift, size - shift, 1), (size - shift, 0, 1)])


def joined(sizes: Sequence[int]) -> IndexMap:
    """Map of a concatenation of sources."""
    pieces, start = [], 0
    for source, size in enumerate(sizes):
        pieces.append(Piece(size, start, 0, source=source))
        start += size
    return IndexMap(start, tuple(piece for piece in pieces if piece.count))
