"""Remembers how dimensions were sharded before they were merged, for when they are split again.

So a feature map that becomes tokens, and then a feature map again, is sharded as before, like the tensors beside it.
"""

from __future__ import annotations

from collections.abc import Hashable
from math import prod

from torch.distributed.tensor.placement_types import Placement, Shard

from ... import _torch
from ...geometry import Group, dim_with_same_shards, groups
from ...sharding.gradient_placements import LARGEST, Placements, key_of
from ...sharding.layout import Layout, reduced
from ...sharding.plan_cache import planned

MergedShards = tuple[tuple[int, int], ...]
"""(mesh dimension, which of the merged dimensions is sharded over it) pairs."""

_remembered: dict[Hashable, MergedShards] = {}


def remember(spec: _torch.Spec, shape: tuple[int, ...]) -> None:
    """Remember the placements of a tensor that is reshaped in the forward pass, by its sizes. The latest one counts."""
    if _torch.in_backward():
        return
    if len(_remembered) >= LARGEST:
        _remembered.clear()
    _remembered.update(_merged(spec, shape))


@planned
def _merged(spec: _torch.Spec, shape: tuple[int, ...]) -> tuple[tuple[Hashable, MergedShards], ...]:
    """Return (key, shards) of each group of dimensions that becomes one dimension."""
    layout = Layout.of(spec)
    found = []
    for group in groups(layout.shape, shape):
        dims = [dim for dim in group.before if layout.shape[dim] > 1]
        if len(dims) > 1 and sum(shape[dim] > 1 for dim in group.after) == 1:
            at = tuple((m, dims.index(p.dim)) for m, p in enumerate(spec.placements)
                       if isinstance(p, Shard) and p.dim in dims)  # fmt: skip
            found.append((key_of((spec.mesh, tuple(layout.shape[dim] for dim in dims))), at))
    return tuple(found)


def recall(spec: _torch.Spec, shape: tuple[int, ...]) -> Placements | None:
    """Return the placements that a tensor should get when its dimensions are split.

    None where they are not known, or in backward, which knows them by other means. What was sharded along another
    dimension in the meantime, such as the batch, is sharded as before as well.
    """
    if _torch.in_backward() or not _splits(spec, shape):
        return None
    layout = Layout.of(spec)
    placements: list[Placement] = [reduced(p, "sum") for p in layout.placements]
    restored: set[int] = set()
    found = groups(layout.shape, shape)
    for group in found:
        over, dims, split = _analyze_group(layout, group, shape)
        shards = _recall_shards(layout, [shape[dim] for dim in dims]) if split else None
        if shards and set(over) <= dict(shards).keys() and _all_sharded(layout, shards):
            restored |= dict(shards).keys()
            for mesh_dim, place in shards:
                placements[mesh_dim] = Shard(dims[place])
    for group in found if restored else ():
        for mesh_dim in set(_analyze_group(layout, group, shape)[0]) - restored:
            placement = layout.placements[mesh_dim]
            assert isinstance(placement, Shard)
            sizes = tuple(layout.mesh.size(m) for m in layout.sharded_dims[placement.dim])
            new = dim_with_same_shards(placement.dim, layout.shape, shape, sizes)
            if new is None:
                return None
            placements[mesh_dim] = Shard(new)
    return tuple(placements) if restored else None


def _recall_shards(layout: Layout, sizes: list[int]) -> MergedShards | None:
    """Return how dimensions of these sizes were sharded; None if that is not known.

    They were merged at once, or first the last ones of them and then the result with the others.
    """
    known = _remembered.get(key_of((layout.mesh, tuple(sizes))))
    for first in range(1, len(sizes) - 1) if known is None else ():
        inner = _remembered.get(key_of((layout.mesh, tuple(sizes[first:]))))
        outer = _remembered.get(key_of((layout.mesh, (*sizes[:first], prod(sizes[first:])))))
        if inner is not None and outer is not None:
            places = dict(inner)
            return tuple((m, place if place < first else first + places.get(m, 0)) for m, place in outer)
    return known


@planned
def _splits(spec: _torch.Spec, shape: tuple[int, ...]) -> bool:
    """Whether any group of dimensions is split (see `_analyze_group`)."""
    layout = Layout.of(spec)
    return any(_analyze_group(layout, group, shape)[2] for group in groups(layout.shape, shape))


def _analyze_group(layout: Layout, group: Group, shape: tuple[int, ...]) -> tuple[list[int], list[int], bool]:
    """Return (mesh dimensions that shard the group, dimensions that it becomes, whether one dimension is split).

    Splits count only if the dimension is sharded, or if the tensor is meanwhile sharded along another dimension that is
    too short for its ranks.
    """
    over = [m for m, p in enumerate(layout.placements) if isinstance(p, Shard) and p.dim in group.before]
    dims = [dim for dim in group.after if shape[dim] > 1]
    counts = bool(over) or _leaves_ranks_empty(layout)
    return over, dims, counts and sum(layout.shape[dim] > 1 for dim in group.before) == 1 and len(dims) > 1


def _leaves_ranks_empty(layout: Layout) -> bool:
    """Whether some dimension is shorter than the number of ranks over which it is sharded."""
    over = layout.sharded_dims.items()
    return any(layout.shape[dim] < prod(layout.mesh.size(m) for m in mesh_dims) for dim, mesh_dims in over)


def _all_sharded(layout: Layout, shards: MergedShards) -> bool:
    """Whether all of these mesh dimensions shard the tensor.

    Otherwise a tensor would be sharded that other operands expect to be replicated, or that is Partial(sum).
    """
    return all(isinstance(layout.placements[mesh_dim], Shard) for mesh_dim, _ in shards)
