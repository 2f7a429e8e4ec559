"""Random schedules of every constructor."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from convmesh.comm import (
    Halo,
    RankLine,
    Schedule,
    boxes,
    broadcast_from_owner,
    flat_ranges,
    halo,
    reshard,
)
from convmesh.geometry import FlatRanges, Grid, HaloPlan, Interval, Shards, Stripes

LINES = [((2,), (0,)), ((4,), (0,)), ((2, 2), (0, 1)), ((2, 2), (1,)), ((4, 1), (0, 1)), ((1, 4), (0, 1))]


Box = tuple[Interval, ...]


@dataclass(frozen=True)
class Listed:
    """Needs that are written down for every rank."""

    needed: tuple[tuple[Interval, ...], ...]

    def parts(self, rank: int) -> tuple[Interval, ...]:
        return self.needed[rank]

    def touching(self, part: Interval) -> Iterable[int]:
        return range(len(self.needed))


@dataclass(frozen=True)
class Case:
    """A schedule for one tensor whose boxes are along `dims`, and what this rank owns and needs of it."""

    schedule: Schedule
    shape: tuple[int, ...]
    dims: tuple[int, ...]
    owned: tuple[Box, ...]
    needed: tuple[Box, ...]


def random_halo(rng: random.Random, line: RankLine) -> Case:
    """Any rank may need anything, in up to two parts, also over the ends."""
    size = rng.randint(1, 14)
    needed = []
    for _ in range(line.size):
        bounds = sorted(rng.randint(-2, size + 2) for _ in range(4))
        parts = [Interval(bounds[0], bounds[1]), Interval(bounds[2], bounds[3])]
        needed.append(tuple(part for part in parts if part))
    plan = HaloPlan(Shards(size, line.sizes), Listed(tuple(needed)))
    schedule = halo(line, Halo(0, plan, (Interval(0, size),)))
    assert schedule.silent == (not any(plan.lacks(rank) for rank in range(line.size)))
    own, need = plan.owned[line.rank], needed[line.rank]
    return Case(schedule, (3, size, 2), (1,), ((own,),), tuple((part,) for part in need))


def random_broadcast(rng: random.Random, line: RankLine) -> Case:
    size = rng.randint(1, 9)
    index = rng.randrange(size)
    schedule = broadcast_from_owner(line, size, index)
    own = Shards(size, line.sizes)[line.rank]
    return Case(schedule, (2, 3, size), (2,), ((own,),), ((Interval(index, index + 1),),))


def random_reshard(rng: random.Random, line: RankLine) -> Case:
    before, after = rng.randint(0, 9), rng.randint(0, 9)
    owned = (Shards(before, line.sizes)[line.rank], Interval(0, after))
    needed = (Interval(0, before), Shards(after, line.sizes)[line.rank])
    return Case(reshard(line, before, after), (after, 2, before), (2, 0), (owned,), (needed,))


def random_boxes(rng: random.Random, line: RankLine) -> Case:
    """Every mesh dimension shards some tensor dimension before and some afterwards, or no longer."""
    sizes = [rng.randint(0, 7) for _ in range(3)]
    grids = []
    for replicates in (False, True):
        at = [rng.randrange(3 + replicates) for _ in line.sizes]
        over = tuple(tuple(m for m, dim in enumerate(at) if dim == side) for side in range(3))
        sides = tuple(Shards(sizes[side], tuple(line.sizes[m] for m in over[side])) for side in range(3))
        grids.append(Grid(line.sizes, sides, over))
    owned, needed = grids
    shape = (sizes[0], 2, sizes[1], sizes[2])
    return Case(boxes(line, owned, needed), shape, (0, 2, 3), owned.boxes(line.rank), needed.boxes(line.rank))


def random_flat_ranges(rng: random.Random, line: RankLine) -> Case:
    outer, size, inner = (rng.randint(1, 6) for _ in range(3))
    stripes = Stripes(outer, inner, Shards(size, line.sizes))
    coarse = rng.choice([n for n in range(1, outer * size * inner + 1) if outer * size * inner % n == 0])
    ranges = FlatRanges(Shards(coarse, line.sizes), outer * size * inner // coarse, stripes.row)
    shape = (2, outer, stripes.row, 3)
    schedule = flat_ranges(line, stripes, ranges)
    owned, needed = stripes.boxes(line.rank), ranges.boxes(line.rank)
    if rng.random() < 0.5:
        return Case(schedule, shape, (1, 2), owned, needed)
    return Case(schedule.transposed(), shape, (1, 2), needed, owned)


MAKERS: list[Callable[[random.Random, RankLine], Case]] = [
    random_halo,
    random_broadcast,
    random_reshard,
    random_boxes,
    random_flat_ranges,
]
