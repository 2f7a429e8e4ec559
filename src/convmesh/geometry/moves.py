"""Transfers between ranks that own some boxes of a tensor and need others, computed for one rank at a time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import product
from math import prod
from typing import Protocol

from .interval import Box, Interval
from .shards import Shards

Parts = tuple[Interval, ...]


class BoxesByRank(Protocol):
    """Boxes of one tensor for each rank."""

    def boxes(self, rank: int, /) -> tuple[Box, ...]: ...

    def touching(self, box: Box, /) -> Iterable[int]:
        """Return, in ascending order, the ranks that may have any of `box`; all other ranks have none of it."""
        ...


@dataclass(frozen=True)
class Moves:
    """The transfers by which every rank gets the boxes it needs from the ranks that own them.

    Owned boxes are disjoint.
    """

    owned: BoxesByRank
    needed: BoxesByRank

    def sends(self, rank: int) -> Iterator[tuple[int, tuple[Box, ...]]]:
        """Yield (destination, boxes) for what `rank` sends, in rank order."""
        owned = self.owned.boxes(rank)
        for dst in _touching(self.needed, owned):
            if dst != rank and (boxes := _common(self.needed.boxes(dst), owned)):
                yield dst, boxes

    def receives(self, rank: int) -> Iterator[tuple[int, tuple[Box, ...]]]:
        """Yield (source, boxes) for what `rank` receives, in rank order."""
        needed = self.needed.boxes(rank)
        for src in _touching(self.owned, needed):
            if src != rank and (boxes := _common(needed, self.owned.boxes(src))):
                yield src, boxes


def _common(needed: tuple[Box, ...], owned: tuple[Box, ...]) -> tuple[Box, ...]:
    """Return the non-empty intersections, in an order that is the same on the sender and the receiver."""
    common = [tuple([a & b for a, b in zip(need, own, strict=True)]) for need in needed for own in owned]
    return tuple([box for box in common if all(box)])


def _touching(regions: BoxesByRank, boxes: tuple[Box, ...]) -> Iterable[int]:
    if len(boxes) == 1:
        return regions.touching(boxes[0])
    return sorted({rank for box in boxes for rank in regions.touching(box)})


class PartsByRank(Protocol):
    """Parts of one dimension for each rank."""

    def parts(self, rank: int, /) -> Parts: ...
    def touching(self, part: Interval, /) -> Iterable[int]: ...


@dataclass(frozen=True)
class Along:
    """Boxes that differ between ranks along one axis only."""

    sides: PartsByRank
    axis: int
    box: Box

    def boxes(self, rank: int) -> tuple[Box, ...]:
        before, after = self.box[: self.axis], self.box[self.axis + 1 :]
        return tuple((*before, part, *after) for part in self.sides.parts(rank))

    def touching(self, box: Box) -> Iterable[int]:
        return self.sides.touching(box[self.axis])


@dataclass(frozen=True)
class Grid:
    """One box per rank of a mesh: each side is either sharded over some mesh dimensions or the same on all ranks.

    `over` holds for each side its mesh dimensions, in the order of `Shards.mesh_sizes`. No mesh dimension occurs twice.
    """

    mesh_sizes: tuple[int, ...]
    sides: tuple[Shards | Interval, ...]
    over: tuple[tuple[int, ...], ...]

    def boxes(self, rank: int) -> tuple[Box, ...]:
        place = self._place(rank)
        return (tuple(self._side(number, place) for number in range(len(self.sides))),)

    def _place(self, rank: int) -> list[int]:
        place = []
        for size in reversed(self.mesh_sizes):
            rank, at = divmod(rank, size)
            place.append(at)
        return place[::-1]

    def _side(self, number: int, place: list[int]) -> Interval:
        side = self.sides[number]
        if isinstance(side, Interval):
            return side
        shard = 0
        for mesh_dim in self.over[number]:
            shard = shard * self.mesh_sizes[mesh_dim] + place[mesh_dim]
        return side[shard]

    def touching(self, box: Box) -> Iterable[int]:
        """Return all ranks whose shard touches `box` along every side, at any place along unused mesh dimensions."""
        steps = [prod(self.mesh_sizes[mesh_dim + 1 :]) for mesh_dim in range(len(self.mesh_sizes))]
        found = [
            [self._offset(shard, over, steps) for shard in side.touching(wanted)]
            for side, over, wanted in zip(self.sides, self.over, box, strict=True)
            if isinstance(side, Shards)
        ]
        free = set(range(len(self.mesh_sizes))).difference(*self.over)
        found += [[at * steps[mesh_dim] for at in range(self.mesh_sizes[mesh_dim])] for mesh_dim in free]
        return sorted(map(sum, product(*found)))

    def _offset(self, shard: int, over: tuple[int, ...], steps: list[int]) -> int:
        """Return what a shard's number along its mesh dimensions contributes to the rank."""
        offset = 0
        for mesh_dim in reversed(over):
            shard, at = divmod(shard, self.mesh_sizes[mesh_dim])
            offset += at * steps[mesh_dim]
        return offset
