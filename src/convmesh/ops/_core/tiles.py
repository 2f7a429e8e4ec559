"""Tiles of windowed operators: what this rank owns of sources and targets, and the halo exchanges between ranks.

An operator that maps sources to targets either fetches the sources that its targets read, or computes from its own
sources and sends each target what it contributes. Transposed operators and gradients map targets to sources in the same
two ways.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Self

import torch

from ... import _torch
from ...comm import Block, Halo, HaloBlock, Held, Pending, RankLine, Schedule, give_back, halo, rank_line, start
from ...geometry import Box, Dependence, HaloPlan, Interval, ShardedDependence, hull, slabs
from ...sharding.layout import Layout

# Border strips cost more per element than a full tile. Where the border is a larger fraction of the tile than this,
# it is cheaper to concatenate tile and halos first (measured: benchmarks, small shards).
LARGEST_BORDER = 0.25


@dataclass(frozen=True)
class Tiling:
    """The sharded dimensions along which an operator has a dependence, and this rank's place along each."""

    dims: tuple[int, ...]
    sharded: tuple[ShardedDependence, ...]
    lines: tuple[RankLine, ...]

    @classmethod
    def of(
        cls, layout: Layout, sources: Sequence[int], targets: Sequence[int], dependences: Mapping[int, Dependence]
    ) -> Self:
        """Return the tiling of sources and targets that are sharded like `layout`, with dependences by dimension."""
        dims, sharded, lines = [], [], []
        for dim, dependence in sorted(dependences.items()):
            mesh_dims = layout.sharded_dims.get(dim, ())
            mesh_sizes = tuple(layout.mesh.size(mesh_dim) for mesh_dim in mesh_dims)
            if prod(mesh_sizes) > 1:
                dims.append(dim)
                sharded.append(ShardedDependence(dependence, sources[dim], targets[dim], mesh_sizes))
                lines.append(rank_line(layout.mesh, mesh_dims))
        return cls(tuple(dims), tuple(sharded), tuple(lines))

    @cached_property
    def sources(self) -> Box:
        """The sources that this rank owns."""
        return tuple(along.sources[rank] for along, rank in self._places)

    @cached_property
    def targets(self) -> Box:
        """The targets that this rank owns."""
        return tuple(along.targets[rank] for along, rank in self._places)

    @cached_property
    def inner_sources(self) -> Box:
        """The part of `sources` that no other rank's targets read."""
        return tuple(along.inner_sources(rank) for along, rank in self._places)

    @cached_property
    def inner_targets(self) -> Box:
        """The part of `targets` that reads no other rank's sources."""
        return tuple(along.inner_targets(rank) for along, rank in self._places)

    def reads(self, targets: Box) -> Box:
        """The sources that these targets read; overhangs the dimension where the operator pads."""
        return tuple(along.dependence.reads(side) for along, side in zip(self.sharded, targets, strict=True))

    def read_by(self, sources: Box) -> Box:
        """The targets that read these sources."""
        return tuple(along.read_by(side) for along, side in zip(self.sharded, sources, strict=True))

    @cached_property
    def sources_read(self) -> Box:
        """The sources that this rank's targets read."""
        return self.reads(self.targets)

    @cached_property
    def readers(self) -> Box:
        """The targets that read this rank's sources."""
        return self.read_by(self.sources)

    def side(self, box: Box, dim: int, size: int) -> Interval:
        """The interval of `dim` in a box over the sharded dimensions; `[0, size)` if `dim` is not sharded."""
        return box[self.dims.index(dim)] if dim in self.dims else Interval(0, size)

    @cached_property
    def source_halos(self) -> Halos:
        """The exchanges that bring the sources that this rank's targets read."""
        return Halos(self.dims, tuple(along.source_plan for along in self.sharded), self.lines)

    @cached_property
    def target_halos(self) -> Halos:
        """The exchanges that bring the targets that read this rank's sources."""
        return Halos(self.dims, tuple(along.target_plan for along in self.sharded), self.lines)

    def fetch_sources(self, own: torch.Tensor) -> Fetch:
        """Start to fetch the sources that this rank's targets read."""
        return Fetch(self.source_halos, own)

    def fetch_targets(self, own: torch.Tensor) -> Fetch:
        """Start to fetch the targets that read this rank's sources."""
        return Fetch(self.target_halos, own)

    def sum_sources(self, block: torch.Tensor) -> torch.Tensor:
        """The adjoint of `fetch_sources`: sum all ranks' blocks (of their boxes `sources_read`) at the owners."""
        return self._sum(block, self.sources_read, self.source_halos)

    def sum_targets(self, block: torch.Tensor) -> torch.Tensor:
        """The adjoint of `fetch_targets`: sum all ranks' blocks (of their boxes `readers`) at the owners."""
        return self._sum(block, self.readers, self.target_halos)

    def _sum(self, block: torch.Tensor, box: Box, halos: Halos) -> torch.Tensor:
        along = list(zip(self.dims, box, halos.owned, halos.independent_schedules, strict=True))
        for dim, side, own, schedule in reversed(along):
            if not schedule.silent or side != own:
                block = give_back(schedule, Held.own(block, (dim,), (side,)), (own,))
        return block

    def combine_targets(
        self, blocks: list[torch.Tensor], fills: Sequence[float], combine: Callable[..., None]
    ) -> list[torch.Tensor]:
        """`sum_targets` for several tensors at once, with any commutative operation in place of the sum.

        `combine(*so_far, *more)` updates `so_far` in place; they start as `fills`.
        """
        halos = self.target_halos
        along = zip(self.dims, self.readers, halos.owned, halos.independent_schedules, strict=True)
        for dim, side, own, schedule in along:
            held = [Held.own(block, (dim,), (side,)) for block in blocks]
            under_way = [start(schedule.transposed(), [one]) for one in held]
            shape = [*blocks[0].shape]
            shape[dim] = len(own)
            results = [block.new_full(shape, fill) for block, fill in zip(blocks, fills, strict=True)]
            kept = (side & own,)  # what this rank has computed of its own targets
            more = [[Block(kept, one.read(kept))] * bool(kept[0]) + pending.finish()[0]
                    for one, pending in zip(held, under_way, strict=True)]  # fmt: skip
            for arrived in zip(*more, strict=True):
                (targets,) = arrived[0].box
                so_far = (result.narrow(dim, targets.start - own.start, len(targets)) for result in results)
                combine(*so_far, *(block.data for block in arrived))
            results[0] = _torch.tie(results[0], *blocks)
            blocks = results
        return blocks

    @property
    def _places(self) -> Iterator[tuple[ShardedDependence, int]]:
        """(dependence, this rank's number along its line) for each sharded dimension."""
        return zip(self.sharded, (along.rank for along in self.lines), strict=True)


@dataclass(frozen=True, eq=False)
class Halos:
    """What this rank owns and needs of one side of a tiling, and the schedules that fetch it."""

    dims: tuple[int, ...]
    plans: tuple[HaloPlan, ...]
    lines: tuple[RankLine, ...]

    @cached_property
    def owned(self) -> Box:
        return tuple(plan.owned[line.rank] for plan, line in zip(self.plans, self.lines, strict=True))

    @cached_property
    def needed(self) -> Box:
        """What this rank needs along each sharded dimension, as one interval without overhangs."""
        sides = zip(self.plans, self.lines, strict=True)
        return tuple(hull(plan.needed.parts(line.rank)) & Interval(0, plan.size) for plan, line in sides)

    @cached_property
    def chained_schedules(self) -> tuple[Schedule, ...]:
        """Schedules for one dimension after the other. Each also sends what earlier ones fetched: corners arrive
        too."""
        return tuple(
            halo(line, Halo(axis, plan, (*self.needed[:axis], *self.owned[axis:])))
            for axis, (plan, line) in enumerate(zip(self.plans, self.lines, strict=True))
        )

    @cached_property
    def independent_schedules(self) -> tuple[Schedule, ...]:
        """Schedules for each dimension alone, whatever the extent of the others."""
        sides = zip(self.plans, self.lines, strict=True)
        return tuple(halo(line, Halo(0, plan, (Interval(0, plan.size),))) for plan, line in sides)

    def block(self, box: Box, ndim: int, fills: bool = False) -> HaloBlock | None:
        """Return what joins a local tensor of `ndim` dimensions and its halos into one block of extent `box`.

        None if the box has gaps or is not exactly what this rank needs; with `fills`, what no one reads may be filled.
        """
        sizes = [plan.size for plan in self.plans]
        return HaloBlock.of(self.chained_schedules, self.dims, sizes, self.owned, self.needed, box, ndim, fills)


class Fetch:
    """Halos of one tensor in flight, one sharded dimension after the other, so that corners are fetched too."""

    def __init__(self, halos: Halos, own: torch.Tensor):
        self.own_box, self.needed = halos.owned, halos.needed
        self.held = Held.own(own, halos.dims, halos.owned)
        self._schedules = iter(halos.chained_schedules)
        self._pending: Pending | None = None
        self._start_next()

    def advance(self) -> None:
        """Wait for the dimension in flight, and start the next."""
        assert self._pending is not None
        (blocks,) = self._pending.finish()
        self.held = self.held.plus(blocks)
        self._start_next()

    def complete(self) -> Held:
        """Wait for all dimensions and return everything that this rank needs."""
        while self._pending is not None:
            self.advance()
        return self.held

    def tie(self, result: torch.Tensor) -> torch.Tensor:
        """Return `result`, made to depend on the fetched tensor on every rank, even where it uses nothing of it."""
        self.complete()
        return _torch.tie(result, self.held.blocks[0].data)

    def _start_next(self) -> None:
        schedule = next(self._schedules, None)
        self._pending = None if schedule is None else start(schedule, [self.held])


def recompute_border(
    result: torch.Tensor, fetch: Fetch, box: Box, inner: Box, part: Callable[[Held, Box], torch.Tensor]
) -> torch.Tensor:
    """Recompute the border of `box` around `inner` in `result`, in place: there it lacks other ranks' values.

    `part(held, strip)` computes a strip of the result while the halos of the next dimension are in flight.
    """
    view = Held.own(result, fetch.held.dims, box)
    for strips in slabs(box, inner):
        fetch.advance()
        for strip in strips:
            view.read(strip).copy_(part(fetch.held, strip))
    return result
