"""Reshaping where no dimension keeps its shards: the flattened elements are resharded.

A rank's shard of merged dimensions is a stripe of their flattened elements, or one range where the outermost dimension
is sharded. One side of the reshape consists of ranges; on the other side any dimension may be the sharded one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod

import torch
from torch.distributed.tensor.placement_types import Placement, Shard

from ...comm import Block, Held, RankLine, Schedule, flat_ranges, rank_line, start
from ...geometry import FlatRanges, Group, Interval, Shards, Stripes, dim_with_same_shards, groups, volume
from ...sharding.layout import Layout

Placements = tuple[Placement, ...]


@dataclass(frozen=True)
class FlatReshard:
    """Reshards a tensor from placements `source` to `target` of the reshaped one.

    `first` and `count` say which dimensions are merged.
    """

    source: Placements
    target: Placements
    first: int
    count: int
    stripes: Stripes
    ranges: FlatRanges
    into_ranges: bool  # from stripes to ranges; else from ranges to stripes
    line: RankLine | None  # None on a rank outside of the mesh

    @cached_property
    def schedule(self) -> Schedule:
        """The exchange between the owners of stripes and those of ranges."""
        assert self.line is not None
        schedule = flat_ranges(self.line, self.stripes, self.ranges)
        return schedule if self.into_ranges else schedule.transposed()

    def __call__(self, local: torch.Tensor) -> torch.Tensor:
        """Exchange the elements. The result, `[lead, elements, trail]`, is in the right order to be reshaped."""
        assert self.line is not None
        lead, trail = prod(local.shape[: self.first]), prod(local.shape[self.first + self.count :])
        stripes, ranges = (regions.boxes(self.line.rank) for regions in (self.stripes, self.ranges))
        owned, needed = (stripes, ranges) if self.into_ranges else (ranges, stripes)
        flat = local.reshape(lead, sum(map(volume, owned)), trail)
        parts = flat.split([volume(box) for box in owned], 1) if owned else [flat]
        boxes = owned or ((Interval(0, 0), Interval(0, 0)),)
        tables = (part.view(lead, len(box[0]), len(box[1]), trail) for part, box in zip(parts, boxes, strict=True))
        held = Held((1, 2), tuple(map(Block, boxes, tables)))
        held = held.plus(start(self.schedule, [held]).finish()[0])
        received = [held.read(box).reshape(lead, volume(box), trail) for box in needed]
        return received[0] if len(received) == 1 else torch.cat([flat[:, :0], *received], 1)


def plan_flat_reshard(layout: Layout, shape: tuple[int, ...], preferred: Placements | None) -> FlatReshard | None:
    """Return the `FlatReshard` of a reshape to `shape`.

    None if more than one group of dimensions needs one, or if no new dimension has something for most ranks.
    `preferred` are the placements that the result should get, if they are known: for these some ranks may be left with
    nothing.
    """
    to_reshard = [group for group in groups(layout.shape, shape) if _needs_reshard(group, layout, shape)]
    if len(to_reshard) != 1:
        return None
    group = to_reshard[0]
    mesh_dims = tuple(m for m, p in enumerate(layout.placements) if isinstance(p, Shard) and p.dim in group.before)
    mesh_sizes = tuple(layout.mesh.size(m) for m in mesh_dims)
    # One dimension is sharded over all of these ranks first: the longest of those that are sharded.
    old = max((dim for dim in group.before if dim in layout.sharded_dims), key=lambda dim: layout.shape[dim])
    before = _stripes(layout.shape, group.before, old, mesh_sizes)
    preferred_dims = {p.dim for m, p in enumerate(preferred or ()) if m in mesh_dims and isinstance(p, Shard)}
    candidates = [(dim, _stripes(shape, group.after, dim, mesh_sizes)) for dim in group.after]
    usable = [
        (dim, after) for dim, after in candidates
        if 1 in (before.outer, after.outer) and (dim in preferred_dims or 2 * after.shards.busy > prod(mesh_sizes))
    ]  # fmt: skip
    if not usable:
        return None
    new, after = min(usable, key=lambda pair: (pair[0] not in preferred_dims, -pair[1].shards.busy))
    source = tuple(Shard(old) if m in mesh_dims else p for m, p in enumerate(layout.placements))
    target = tuple(Shard(new) if m in mesh_dims else _kept(p, layout, shape) for m, p in enumerate(layout.placements))
    into = after.outer == 1
    stripes, ranges = (before, after) if into else (after, before)
    line = rank_line(layout.mesh, mesh_dims) if layout.mesh.get_coordinate() is not None else None
    owned = FlatRanges(ranges.shards, ranges.inner, stripes.row)
    return FlatReshard(source, target, group.before[0], len(group.before), stripes, owned, into, line)


def _stripes(shape: Sequence[int], dims: Sequence[int], sharded_dim: int, mesh_sizes: tuple[int, ...]) -> Stripes:
    """The elements of the merged dimensions `dims` that each rank owns if `sharded_dim` is sharded."""
    outer, inner = (prod(shape[dim] for dim in side) for side in ([d for d in dims if d < sharded_dim],
                                                                  [d for d in dims if d > sharded_dim]))  # fmt: skip
    return Stripes(outer, inner, Shards(shape[sharded_dim], mesh_sizes))


def _needs_reshard(group: Group, layout: Layout, shape: tuple[int, ...]) -> bool:
    """Whether the sharded dimensions of this group have no dimension in `shape` that keeps their shards."""
    sharded_dim = [dim for dim in group.before if dim in layout.sharded_dims]
    return len(sharded_dim) > 1 or any(_new_dim(dim, layout, shape) is None for dim in sharded_dim)


def _new_dim(dim: int, layout: Layout, shape: tuple[int, ...]) -> int | None:
    """The dimension of `shape` that has the same shards as `dim`; None if there is none."""
    return dim_with_same_shards(dim, layout.shape, shape, tuple(layout.mesh.size(m) for m in layout.sharded_dims[dim]))


def _kept(placement: Placement, layout: Layout, shape: tuple[int, ...]) -> Placement:
    """The placement of a dimension that keeps its shards, in the new shape."""
    if not isinstance(placement, Shard):
        return placement
    new = _new_dim(placement.dim, layout, shape)
    assert new is not None, "only one group is resharded"
    return Shard(new)
