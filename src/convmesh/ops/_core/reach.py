"""What operators share whose targets read runs of sources: a rank's part of both, and the exchanges between them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod

import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Partial, Placement, Replicate, Shard

from ... import _torch
from ...comm import Held, Line, give_back, line
from ...geometry import Box, Cut, HaloPlan, Interval, Reading
from ...sharding.layout import Layout, dense_stride, is_sum
from ...sharding.redistribute import relocated
from ...sharding.sharding_table import Row, Wanted, choose, input_placements, output_placements
from .tiles import Fetch

R, P = Replicate(), Partial()


@dataclass(frozen=True)
class Reach:
    """The dimensions that are both read in runs and split, and where this rank stands along each."""

    dims: tuple[int, ...]
    cuts: tuple[Cut, ...]
    lines: tuple[Line, ...]

    @cached_property
    def sources(self) -> Box:
        return tuple(cut.sources[line.rank] for cut, line in self._pairs)

    @cached_property
    def targets(self) -> Box:
        return tuple(cut.targets[line.rank] for cut, line in self._pairs)

    @cached_property
    def read(self) -> Box:
        """The sources that this rank's targets read; overhangs where the operator pads."""
        return tuple(cut.reading.reads(side) for cut, side in zip(self.cuts, self.targets, strict=True))

    @cached_property
    def touched(self) -> Box:
        """The targets that read this rank's sources."""
        return tuple(cut.touched(side) for cut, side in zip(self.cuts, self.sources, strict=True))

    def begin(self, own: torch.Tensor) -> Fetch:
        """Begin to collect the sources that this rank's targets read."""
        return Fetch(self, self._source_plans, self.sources, own)

    def fetch(self, own: torch.Tensor) -> Fetch:
        """Hold the sources that this rank's targets read. What is made of them has to be tied to the exchange."""
        return self.begin(own).completed()

    def fetch_touched(self, own: torch.Tensor) -> Fetch:
        """Hold the targets that read this rank's sources, likewise."""
        return Fetch(self, self._target_plans, self.targets, own).completed()

    def return_read(self, block: torch.Tensor) -> torch.Tensor:
        """The adjoint of `fetch`: sources get the sum of what ranks made of them. `block` has the box `read`."""
        return self._return(block, self.read, self._source_plans)

    def return_touched(self, block: torch.Tensor) -> torch.Tensor:
        """The adjoint of `fetch_touched`: targets get the sum of what ranks have for them, `block` in box `touched`."""
        return self._return(block, self.touched, self._target_plans)

    def _return(self, block: torch.Tensor, box: Box, plans: Sequence[HaloPlan]) -> torch.Tensor:
        for dim, side, plan, along in reversed(list(zip(self.dims, box, plans, self.lines, strict=True))):
            if not plan.silent or side != plan.owned[along.rank]:
                block = give_back(Held.own(block, (dim,), (side,)), dim, plan, along)
        return block

    def side(self, box: Box, dim: int, whole: int) -> Interval:
        """The interval of `dim` in a box of the split dimensions; all of it if it is not split."""
        return box[self.dims.index(dim)] if dim in self.dims else Interval(0, whole)

    @cached_property
    def _source_plans(self) -> list[HaloPlan]:
        return [cut.source_plan for cut in self.cuts]

    @cached_property
    def _target_plans(self) -> list[HaloPlan]:
        return [cut.target_plan for cut in self.cuts]

    @property
    def _pairs(self) -> list[tuple[Cut, Line]]:
        return list(zip(self.cuts, self.lines, strict=True))


@dataclass(frozen=True)
class ReachPlan:
    """Where the operands have to be, what comes out of them and where it should go, and this rank's part."""

    operands: tuple[Layout, ...]
    computed: Layout
    wanted: Layout
    reach: Reach | None  # None on a rank outside of the mesh

    def finish(self, local: torch.Tensor) -> DTensor:
        local = relocated(local, self.computed, self.wanted)
        return _torch.wrap(local.contiguous(memory_format=self.wanted.memory_format), self.wanted.spec)

    def outside(self, like: DTensor, dtype: torch.dtype | None = None) -> DTensor:
        return _torch.wrap(_torch.local_of(like).new_empty(0, dtype=dtype), self.wanted.spec)


Readings = Mapping[int, Reading]


def ask_for_memory(source: Layout, shape: Sequence[int]) -> None:
    """Raise what one process does if there is no memory for a result of `shape` that is cut as its source is: before a
    plan is made that has a number for every index of it."""
    stride = dense_stride(tuple(shape), torch.contiguous_format)
    result = Layout(source.mesh, source.placements, tuple(shape), stride, source.dtype)
    torch.empty(result.local_shape, dtype=source.dtype, device=source.mesh.device_type)


def plan_targets(source: Layout, shape: tuple[int, ...], readings: Readings, linear: bool) -> ReachPlan:
    """From sources to targets of `shape`. Shards stay where they are; only a linear operator runs on pending sums."""

    def kept(placement: Placement) -> Placement:
        return placement if isinstance(placement, Shard) or (linear and is_sum(placement)) else R

    placements = tuple(kept(placement) for placement in source.placements)
    moved = source.placed(placements)
    stride = dense_stride(shape, source.memory_format)
    target = Layout(source.mesh, placements, shape, stride, source.dtype)
    return ReachPlan((moved,), target, target, _reach(moved, shape, readings))


def plan_sources(operator: str, named: Sequence[tuple[str, Layout]], source: Layout, readings: Readings) -> ReachPlan:
    """From the targets' gradient (and indices, if `named` has them) to the gradient of the sources, linear in it."""
    rank = len(source.shape)
    count = len(named)
    rows = [
        Row("replicated", (R,) * count, (R,)),
        *[Row("sharded", (Shard(dim),) * count, (Shard(dim),)) for dim in range(rank)],
        Row("sum of gradients", (P, *(R,) * (count - 1)), (P,)),
    ]
    wish = Wanted(source.placements, prod(source.shape))
    chosen = choose(operator, rows, named, [wish])
    placements = output_placements(chosen, 0)
    dense = Layout(
        source.mesh, placements, source.shape, dense_stride(source.shape, source.memory_format), named[0][1].dtype
    )
    return ReachPlan(
        tuple(layout.placed(input_placements(chosen, number)) for number, (_, layout) in enumerate(named)),
        dense,
        dense.placed(tuple(wish.becomes(*entry) for entry in enumerate(placements))),
        _reach(dense, named[0][1].shape, readings),
    )


def _reach(source: Layout, target_shape: Sequence[int], readings: Readings) -> Reach | None:
    if source.mesh.get_coordinate() is None:
        return None
    dims, cuts, lines = [], [], []
    for dim, reading in sorted(readings.items()):
        mesh_dims = source.cuts.get(dim, ())
        mesh_sizes = tuple(source.mesh.size(mesh_dim) for mesh_dim in mesh_dims)
        if prod(mesh_sizes) > 1:
            dims.append(dim)
            cuts.append(Cut(reading, source.shape[dim], target_shape[dim], mesh_sizes))
            lines.append(line(source.mesh, mesh_dims))
    return Reach(tuple(dims), tuple(cuts), tuple(lines))
