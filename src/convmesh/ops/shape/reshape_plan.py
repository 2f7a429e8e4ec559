"""Plans of reshapes: the placements that the tensor needs, and those of the result.

A flattened dimension can be sharded only if the outermost of its dimensions was. Where another one is sharded, or the
shards would differ, the tensor is first sharded along another dimension: an all-to-all. Where the layers that follow
could not use that dimension, the flattened elements themselves are resharded.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from math import prod

import torch
from torch.distributed.tensor.placement_types import Placement, Replicate, Shard

from ... import _torch
from ...geometry import are_merged, dim_with_same_shards
from ...sharding.gradient_placements import Placements
from ...sharding.layout import Layout, dense_stride, reduced
from ...sharding.plan_cache import planned
from .flat_reshard import FlatReshard, plan_flat_reshard


@dataclass(frozen=True)
class ViewPlan:
    """The layouts of a reshape: the operand's, the result's as reshaped, and the one that it is redistributed to."""

    source: Layout
    output: Layout
    wanted: Layout
    reshard: FlatReshard | None = None  # how the flattened elements are resharded, if they are


def full_shape(shape: tuple[int, ...], wanted: tuple[int, ...]) -> tuple[int, ...]:
    """Return `wanted` with its -1 filled in; torch itself raises where that is impossible."""
    known = prod(size for size in wanted if size != -1)
    return tuple(prod(shape) // max(1, known) if size == -1 else size for size in wanted)


def placements_after_view(placements: Placements, layout: Layout, shape: tuple[int, ...]) -> Placements | None:
    """Return the placements of the result if every rank reshapes its own shard; None where that is not possible."""
    placed = layout.placed(placements)
    moved: dict[int, int] = {}
    for dim, mesh_dims in placed.sharded_dims.items():
        new = dim_with_same_shards(dim, layout.shape, shape, tuple(layout.mesh.size(m) for m in mesh_dims))
        if new is None:
            return None
        moved[dim] = new
    if len(set(moved.values())) < len(moved):
        return None
    return tuple(Shard(moved[p.dim]) if isinstance(p, Shard) else p for p in placements)


@planned
def plan_view(spec: _torch.Spec, shape: tuple[int, ...], preferred: Placements | None) -> ViewPlan | None:
    """Plan a reshape that needs communication; None where every rank can reshape its shard.

    `preferred` are the placements that the result should get, if they are known.
    """
    layout = Layout.of(spec)
    if prod(layout.shape) != prod(shape) or not prod(shape):
        return None  # torch raises, or there is nothing to send
    current = tuple(reduced(p, "sum") for p in layout.placements)
    without_exchange = placements_after_view(current, layout, shape)
    stays = without_exchange is not None and (preferred is None or without_exchange == preferred)
    if without_exchange is not None and stays and not _resizes_uneven(current, without_exchange, layout, shape):
        return None
    source, local = (current, True) if without_exchange is not None else _choose_placements(current, layout, shape)
    placements = placements_after_view(source, layout, shape)
    assert placements is not None, "a replicated tensor can be reshaped"
    reshard = None if local else plan_flat_reshard(layout.placed(current), shape, preferred)
    if reshard is not None:
        source, placements = reshard.source, reshard.target
    output = _layout_of_copy(layout, placements, shape)
    return ViewPlan(layout.placed(source), output, output if preferred is None else output.placed(preferred), reshard)


def _layout_of_copy(layout: Layout, placements: Placements, shape: tuple[int, ...]) -> Layout:
    """Return the layout of a result that is a new tensor.

    It has the dimension order of one device's view, which is the order in which random numbers are drawn; or it is
    contiguous where one device would copy.
    """
    view = _full_view(layout, placements, shape)
    if view is None:
        return Layout(layout.mesh, placements, shape, dense_stride(shape, torch.contiguous_format), layout.dtype)
    with _torch.no_modes():
        without_gaps = torch.empty_like(torch.empty_strided(shape, view.stride, device="meta")).stride()
    return Layout(layout.mesh, placements, shape, tuple(without_gaps), layout.dtype)


def _resizes_uneven(before: Placements, after: Placements, layout: Layout, shape: tuple[int, ...]) -> bool:
    """Whether the reshape flattens an unevenly sharded dimension, or makes one: torch refuses even what is possible."""
    pairs = [(p, q) for p, q in zip(before, after, strict=True) if isinstance(p, Shard) and isinstance(q, Shard)]
    return any(layout.shape[p.dim] != shape[q.dim] and not layout.shards(p.dim).even for p, q in pairs)


def _choose_placements(current: Placements, layout: Layout, shape: tuple[int, ...]) -> tuple[Placements, bool]:
    """Choose placements from which every rank can reshape its shard.

    Other dimensions are sharded over the mesh dimensions that stand in the way: preferably the batch, if it is large
    enough, because then all that follows is local; else the outermost of the merged dimensions, because tokens are all
    alike and stay sharded in the layers that follow; else the outermost that fits. Replicate() only where none fits.

    Also return whether the choice is one of the first two.
    """
    cheapest: tuple[int, ...] | None = None
    best = current
    for choice in product(*(_candidates(p, layout) for p in current)):
        if placements_after_view(choice, layout, shape) is None:
            continue
        changes = [after for before, after in zip(current, choice, strict=True) if before != after]
        sharded_dims = layout.placed(choice).sharded_dims
        empty_ranks = sum(
            layout.shape[dim] < prod(layout.mesh.size(m) for m in mesh_dims) for dim, mesh_dims in sharded_dims.items()
        )
        twice = sum(len(mesh_dims) > 1 for mesh_dims in sharded_dims.values())
        unrelated = sum(_is_unrelated(*change, layout, shape) for change in zip(current, choice, strict=True))
        price = (sum(not isinstance(after, Shard) for after in changes), len(changes), empty_ranks, twice, unrelated)
        if cheapest is None or price < cheapest:
            cheapest, best = price, choice
    assert cheapest is not None, "a replicated tensor can be reshaped"
    return best, not (cheapest[0] or cheapest[2] or cheapest[4])


def _is_unrelated(before: Placement, after: Placement, layout: Layout, shape: tuple[int, ...]) -> bool:
    """Whether the newly sharded dimension is neither the batch nor merged with the one that was sharded."""
    if not isinstance(before, Shard) or not isinstance(after, Shard) or after.dim == 0:
        return False
    return not are_merged(before.dim, after.dim, layout.shape, shape)


def _candidates(placement: Placement, layout: Layout) -> list[Placement]:
    """Return the placements to try in place of this one: itself, Shard of any dimension of more than one index,
    Replicate()."""
    if not isinstance(placement, Shard):
        return [placement]
    return [placement, *(Shard(dim) for dim in range(len(layout.shape)) if layout.shape[dim] > 1), Replicate()]


@planned
def plan_local_view(spec: _torch.Spec, shape: tuple[int, ...]) -> Layout | None:
    """Return the layout of a view of a tensor that is not sharded; None where torch's DTensor knows it, or raises."""
    layout = Layout.of(spec)
    if any(isinstance(p, Shard) or is_strided(p) for p in layout.placements) or not layout.present:
        return None
    return _full_view(layout, layout.placements, shape)


@planned
def plan_shard_view(spec: _torch.Spec, shape: tuple[int, ...]) -> Layout | None:
    """Return the layout of a view of every rank's own shard; None where the full tensor cannot be viewed like that."""
    layout = Layout.of(spec)
    placements = placements_after_view(layout.placements, layout, shape) if _torch.plain_order(spec) else None
    return None if placements is None else _full_view(layout, placements, shape)


def _full_view(layout: Layout, placements: Placements, shape: tuple[int, ...]) -> Layout | None:
    """Return the layout of the view, with the strides of one device; None if one device cannot view the tensor."""
    try:
        with _torch.no_modes():
            stride = torch.empty_strided(layout.shape, layout.stride, device="meta").view(shape).stride()
    except RuntimeError:
        return None
    return Layout(layout.mesh, placements, shape, stride, layout.dtype)


def is_strided(placement: Placement) -> bool:
    """Whether this is torch's _StridedShard: a dimension that is sharded in another order than the mesh's."""
    return type(placement).__name__ == "_StridedShard"
