"""Halo plans: what each rank along one dimension owns and what it needs, from which follows what is sent."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property

from .interval import Box, Interval
from .moves import Along, Moves, Parts, PartsByRank
from .shards import Shards


@dataclass(frozen=True, eq=False)
class Reads:
    """The indices of one dimension that each rank reads to produce its shard of another.

    `reads` maps a shard to the parts that it reads. `read_by` maps a part to the range of indices that read any of it;
    it may include too many, and if no index reads the part it is an empty interval at the place where one would be.
    """

    produced: Shards
    reads: Callable[[Interval], Parts]
    read_by: Callable[[Interval], Interval | Parts]

    def parts(self, rank: int) -> Parts:
        return self.reads(self.produced[rank])

    def touching(self, part: Interval) -> Iterable[int]:
        readers = self.read_by(part)
        # `reads` includes the gaps between what two neighbouring indices read, which no index reads: widen by one.
        wider = [
            Interval(one.start - 1, one.stop + 1) for one in ((readers,) if isinstance(readers, Interval) else readers)
        ]
        if len(wider) == 1:
            return self.produced.touching(wider[0])
        return sorted({rank for one in wider for rank in self.produced.touching(one)})


@dataclass(frozen=True)
class Everywhere:
    """The same part, needed by every rank."""

    part: Interval
    ranks: int

    def parts(self, rank: int) -> Parts:
        return (self.part,)

    def touching(self, part: Interval) -> Iterable[int]:
        return range(self.ranks) if self.part & part else ()


@dataclass(frozen=True, eq=False)
class HaloPlan:
    """What ranks own and need of a dimension: rank `r` owns `owned[r]`, and needs all of `needed.parts(r)` to compute.

    What a rank needs may consist of several disjoint parts. It may overhang the dimension; the overhang is owned by no
    rank and never sent. Indices that a rank owns but does not need are not touched.
    """

    owned: Shards
    needed: PartsByRank

    @property
    def size(self) -> int:
        return self.owned.size

    def along(self, axis: int, box: Box) -> Moves:
        """Return the plan for boxes with this dimension as side `axis`, and the other sides of `box` on all ranks."""
        return Moves(Along(self.owned, axis, box), Along(self.needed, axis, box))

    def sends(self, rank: int) -> list[tuple[int, Interval]]:
        """Return what `rank` sends: (destination, indices), in rank order."""
        return [(dst, part) for dst, boxes in self._moves.sends(rank) for (part,) in boxes]

    def receives(self, rank: int) -> list[tuple[int, Interval]]:
        """Return what `rank` receives: (source, indices), in rank order."""
        return [(src, part) for src, boxes in self._moves.receives(rank) for (part,) in boxes]

    @cached_property
    def _moves(self) -> Moves:
        return self.along(0, (Interval(0, self.size),))

    @cached_property
    def silent(self) -> bool:
        """Whether no rank sends anything, so that all of them can skip the exchange."""
        return not any(self.lacks(rank) for rank in range(len(self.owned)))

    def lacks(self, rank: int) -> int:
        """Return the number of indices that a rank has to receive."""
        own, full = self.owned[rank], Interval(0, self.size)
        inside = [part & full for part in self.needed.parts(rank)]
        return sum(part.size - (part & own).size for part in inside)

    @cached_property
    def sent(self) -> int:
        """The approximate number of indices sent by all ranks, as if all but the first and the last were alike."""
        last = self.owned.busy - 1
        return self.lacks(0) + (self.lacks(last) + (last - 1) * self.lacks(last // 2) if last > 0 else 0)
