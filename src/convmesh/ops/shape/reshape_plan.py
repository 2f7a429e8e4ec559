"""Plans of reshapes: where the tensor has to be, and where the result then lies.

A flattened dimension is sharded only where the outermost of its dimensions was. Where another one is sharded, or
the parts come out differently, the tensor is sharded along another dimension first: an all-to-all. Where
that is none to go on with, the flattened elements themselves are resharded.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from math import prod

import torch
from torch.distributed.tensor.placement_types import Placement, Replicate, Shard

from ... import _torch
from ...geometry import merged, where_sharded
from ...sharding.gradient_placements import Placements
from ...sharding.layout import Layout, dense_stride, reduced
from ...sharding.plan_cache import planned
from .flat_reshard import Flow, flow_of


@dataclass(frozen=True)
class ViewPlan:
    source: Layout
    output: Layout
    wanted: Layout
    flow: Flow | None = None  # how the elements change their owner between the two shapes


def full_shape(shape: tuple[int, ...], wanted: tuple[int, ...]) -> tuple[int, ...]:
    """With the one -1 worked out; torch itself complains where it cannot be."""
    known = prod(size for size in wanted if size != -1)
    return tuple(prod(shape) // max(1, known) if size == -1 else size for size in wanted)


def viewed(placements: Placements, layout: Layout, shape: tuple[int, ...]) -> Placements | None:
    """Where a reshaped tensor lies if every rank reshapes its own part; None where that is not possible."""
    placed = layout.placed(placements)
    moved: dict[int, int] = {}
    for dim, mesh_dims in placed.sharded_dims.items():
        new = where_sharded(dim, layout.shape, shape, tuple(layout.mesh.size(m) for m in mesh_dims))
        if new is None:
            return None
        moved[dim] = new
    if len(set(moved.values())) < len(moved):
        return None
    return tuple(Shard(moved[p.dim]) if isinstance(p, Shard) else p for p in placements)


@planned
def plan_view(spec: _torch.Spec, shape: tuple[int, ...], back: Placements | None) -> ViewPlan | None:
    """None where the tensor can be reshaped as it is; `back` is where the result should go, if it is known."""
    layout = Layout.of(spec)
    if prod(layout.shape) != prod(shape) or not prod(shape):
        return None  # torch complains, or there is nothing to move
    given = tuple(reduced(p, "sum") for p in layout.placements)
    as_it_is = viewed(given, layout, shape)
    stays = as_it_is is not None and (back is None or as_it_is == back)
    if as_it_is is not None and stays and not _resizes_uneven(given, as_it_is, layout, shape):
        return None
    source, local = (given, True) if as_it_is is not None else _nearest(given, layout, shape)
    placements = viewed(source, layout, shape)
    assert placements is not None, "a replicated tensor can be reshaped"
    flow = None if local else flow_of(layout.placed(given), shape, back)
    if flow is not None:
        source, placements = flow.source, flow.target
    output = _new_tensor(layout, placements, shape)
    return ViewPlan(layout.placed(source), output, output if back is None else output.placed(back), flow)


def _new_tensor(layout: Layout, placements: Placements, shape: tuple[int, ...]) -> Layout:
    """In the order of one device's view, which random numbers are drawn in; what it cannot view it copies."""
    view = _view_of_all(layout, placements, shape)
    if view is None:
        return Layout(layout.mesh, placements, shape, dense_stride(shape, torch.contiguous_format), layout.dtype)
    with _torch.no_modes():
        without_gaps = torch.empty_like(torch.empty_strided(shape, view.stride, device="meta")).stride()
    return Layout(layout.mesh, placements, shape, tuple(without_gaps), layout.dtype)


def _resizes_uneven(before: Placements, after: Placements, layout: Layout, shape: tuple[int, ...]) -> bool:
    """Whether an unevenly sharded dimension is flattened, or made by it: torch does not do that where it could."""
    pairs = [(p, q) for p, q in zip(before, after, strict=True) if isinstance(p, Shard) and isinstance(q, Shard)]
    return any(layout.shape[p.dim] != shape[q.dim] and not layout.shards(p.dim).even for p, q in pairs)


def _nearest(given: Placements, layout: Layout, shape: tuple[int, ...]) -> tuple[Placements, bool]:
    """Shard other dimensions over the mesh dimensions that stand in the way: the batch, if it is large enough, because
    after it everything is local; else the outermost of those that are merged, as tokens are all alike and stay sharded
    in the layers that follow; else the outermost that fits. Replicate only where none fits.

    And whether it is one of the first two.
    """
    cheapest: tuple[int, ...] | None = None
    best = given
    for choice in product(*(_choices(p, layout) for p in given)):
        if viewed(choice, layout, shape) is None:
            continue
        changes = [after for before, after in zip(given, choice, strict=True) if before != after]
        sharded_dims = layout.placed(choice).sharded_dims
        idle = sum(
            layout.shape[dim] < prod(layout.mesh.size(m) for m in mesh_dims) for dim, mesh_dims in sharded_dims.items()
        )
        twice = sum(len(mesh_dims) > 1 for mesh_dims in sharded_dims.values())
        apart = sum(_apart(before, after, layout, shape) for before, after in zip(given, choice, strict=True))
        price = (sum(not isinstance(after, Shard) for after in changes), len(changes), idle, twice, apart)
        if cheapest is None or price < cheapest:
            cheapest, best = price, choice
    assert cheapest is not None, "a replicated tensor can be reshaped"
    return best, not (cheapest[0] or cheapest[2] or cheapest[4])


def _apart(before: Placement, after: Placement, layout: Layout, shape: tuple[int, ...]) -> bool:
    """Whether the dimension that is sharded now has nothing to do with the one that was; the batch suits all."""
    if not isinstance(before, Shard) or not isinstance(after, Shard) or after.dim == 0:
        return False
    return not merged(before.dim, after.dim, layout.shape, shape)


def _choices(placement: Placement, layout: Layout) -> list[Placement]:
    if not isinstance(placement, Shard):
        return [placement]
    return [placement, *(Shard(dim) for dim in range(len(layout.shape)) if layout.shape[dim] > 1), Replicate()]


@planned
def plan_local_view(spec: _torch.Spec, shape: tuple[int, ...]) -> Layout | None:
    """Where a view lies of a tensor that no rank has a part of only; None where torch's DTensor knows, or complains."""
    layout = Layout.of(spec)
    if any(isinstance(p, Shard) or is_strided(p) for p in layout.placements) or not layout.present:
        return None
    return _view_of_all(layout, layout.placements, shape)


@planned
def plan_parts_view(spec: _torch.Spec, shape: tuple[int, ...]) -> Layout | None:
    """Where a tensor lies of which every rank reshapes its own part; None where the full tensor cannot be viewed so."""
    layout = Layout.of(spec)
    placements = viewed(layout.placements, layout, shape) if _torch.plain_order(spec) else None
    return None if placements is None else _view_of_all(layout, placements, shape)


def _view_of_all(layout: Layout, placements: Placements, shape: tuple[int, ...]) -> Layout | None:
    try:
        with _torch.no_modes():
            stride = torch.empty_strided(layout.shape, layout.stride, device="meta").view(shape).stride()
    except RuntimeError:
        return None
    return Layout(layout.mesh, placements, shape, stride, layout.dtype)


def is_strided(placement: Placement) -> bool:
    return type(placement).__name__ == "_StridedShard"
