"""Along one line of ranks: what each owns, what each must hold, and so what is sent."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property

from .interval import Box, Interval
from .moves import Along, Moves, Parts, Sides
from .shards import Shards


@dataclass(frozen=True, eq=False)
class Reads:
    """What each rank reads of one dimension to produce its shard of another.

    `reads` maps a shard to the parts that it reads, and `read_by` a part to the indices that read any of it, from the
    first to the last. It may name too many, and tells where it would be if none does.
    """

    made: Shards
    reads: Callable[[Interval], Parts]
    read_by: Callable[[Interval], Interval | Parts]

    def parts(self, rank: int) -> Parts:
        return self.reads(self.made[rank])

    def touching(self, part: Interval) -> Iterable[int]:
        readers = self.read_by(part)
        # What is read is said from the first to the last index, with the gaps between two neighbours that read.
        wider = [
            Interval(one.start - 1, one.stop + 1) for one in ((readers,) if isinstance(readers, Interval) else readers)
        ]
        if len(wider) == 1:
            return self.made.touching(wider[0])
        return sorted({rank for one in wider for rank in self.made.touching(one)})


@dataclass(frozen=True)
class Everywhere:
    """Every rank needs the same part."""

    part: Interval
    ranks: int

    def parts(self, rank: int) -> Parts:
        return (self.part,)

    def touching(self, part: Interval) -> Iterable[int]:
        return range(self.ranks) if self.part & part else ()


@dataclass(frozen=True, eq=False)
class HaloPlan:
    """A dimension of which rank `r` owns `owned[r]` and must hold all of `needed.parts(r)` to compute.

    What a rank needs may be in several parts, which do not overlap. It may overhang the dimension: nobody owns what
    lies there, so it is not sent. What a rank owns beside what it needs is left alone.
    """

    owned: Shards
    needed: Sides

    @property
    def size(self) -> int:
        return self.owned.size

    def along(self, axis: int, box: Box) -> Moves:
        """The same of boxes, whose side number `axis` is this dimension; along the others all ranks of the line have
        the sides of `box`."""
        return Moves(Along(self.owned, axis, box), Along(self.needed, axis, box))

    def sends(self, rank: int) -> list[tuple[int, Interval]]:
        """What `rank` sends: (destination, indices), in the order of the ranks."""
        return [(dst, part) for dst, boxes in self._moves.sends(rank) for (part,) in boxes]

    def receives(self, rank: int) -> list[tuple[int, Interval]]:
        """What `rank` receives: (source, indices), in the order of the ranks."""
        return [(src, part) for src, boxes in self._moves.receives(rank) for (part,) in boxes]

    @cached_property
    def _moves(self) -> Moves:
        return self.along(0, (Interval(0, self.size),))

    @cached_property
    def silent(self) -> bool:
        """Nothing is sent between any two ranks: all of them can leave the exchange out."""
        return not any(self.lacks(rank) for rank in range(len(self.owned)))

    def lacks(self, rank: int) -> int:
        """How many indices a rank has to receive."""
        own, full = self.owned[rank], Interval(0, self.size)
        inside = [part & full for part in self.needed.parts(rank)]
        return sum(part.size - (part & own).size for part in inside)

    @cached_property
    def sent(self) -> int:
        """How many indices are sent in all, about: as if all ranks but the first and the last were alike."""
        last = self.owned.busy - 1
        return self.lacks(0) + (self.lacks(last) + (last - 1) * self.lacks(last // 2) if last > 0 else 0)
