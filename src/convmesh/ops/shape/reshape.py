"""Reshaping DTensors whose shards are not those of the new shape.

A flattened dimension is sharded only where the outermost of its dimensions was. Where another one is sharded, or
the parts come out differently, the tensor is sharded along another dimension first: an all-to-all. Where
that is none to go on with, the flattened elements themselves are resharded.
The gradient goes back to where the tensor was, and so do dimensions that were merged once they are split again. What
torch can do as a view stays one.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from math import prod
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement, Replicate, Shard

from ... import _torch
from ...geometry import merged, where_sharded
from ...sharding.call import copy_of
from ...sharding.gradient_placements import Hints, Placements
from ...sharding.layout import Layout, dense_stride, reduced
from ...sharding.plan_cache import planned
from ...sharding.redistribute import check_placed, move
from ...sharding.registry import Behaviour, made_of_others, rule
from . import merged_dims
from .flat_reshard import Flow, flow_of

aten = torch.ops.aten

VIEW = Behaviour(
    "dimensions that keep their parts; others are exchanged for one that does",
    "nothing, or an all-to-all; a gather only where all dimensions are too short for most ranks",
)  # fmt: skip

made_of_others(aten.reshape.default, aten.flatten.using_ints, aten.unflatten.int)


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
    if any(isinstance(p, Shard) or _strange(p) for p in layout.placements) or not layout.present:
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


_came_from = Hints()


@rule(aten.view.default, aten._unsafe_view.default, behaviour=VIEW)
def view(operator: _torch.Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    input, wanted = _torch.arguments(operator, args, kwargs)
    if sum(map(_torch.has_symbols, map(_torch.known, input.shape))) > 1:
        _torch.settle(input)  # torch does not trace products of several symbols
    before = tuple(map(_torch.known, input.shape))
    shape = full_shape(before, tuple(map(_torch.known, wanted)))
    if not prod(before) and not prod(shape):
        return _without_elements(_torch.spec_of(input), _torch.local_of(input), shape)
    if not any(type(p) is Shard for p in input.placements) or any(_strange(p) for p in input.placements):
        output = plan_local_view(_torch.spec_of(input), shape)
        if output is None:
            return _torch.stock(operator, args, kwargs)
        return _as_it_is(operator, args, kwargs, output)
    back = _came_from.recall((input.device_mesh, before, shape, input.placements))
    if prod(shape) == prod(before):
        merged_dims.remember(_torch.spec_of(input), shape)
        back = merged_dims.recall(_torch.spec_of(input), shape) if back is None else back
    plan = plan_view(_torch.spec_of(input), shape, back)
    if plan is None:
        output = plan_parts_view(_torch.spec_of(input), shape)
        return _torch.stock(operator, args, kwargs) if output is None else _as_it_is(operator, args, kwargs, output)
    check_placed("view", (("input", input),))
    went_to = (input.device_mesh, shape, before, plan.output.placements)
    _came_from.remember(went_to, tuple(reduced(placement, "sum") for placement in input.placements))
    travels = _travels(input, plan.source)
    local = move(input, plan.source) if travels else _torch.local_of(input)
    if plan.output.present:
        local = (local if plan.flow is None else plan.flow(local)).reshape(plan.output.local_shape)
    if plan.wanted is plan.output and plan.flow is None and not travels:
        return _torch.as_view(operator, args, kwargs, _torch.wrap(local, plan.output.spec))
    # What has moved may lie with gaps, and the next view of it goes by the strides that its spec says.
    result = _torch.wrap(plan.output.laid(local), plan.output.spec)
    if plan.wanted is not plan.output:
        result = _torch.wrap(plan.wanted.laid(move(result, plan.wanted)), plan.wanted.spec)
    return _copy(result, input)


def _travels(input: DTensor, target: Layout) -> bool:
    """Whether a tensor has to be sent to lie there: over one rank it lies in any way already."""
    placements = zip(input.placements, target.placements, strict=True)
    return any(p != q and target.mesh.size(m) > 1 for m, (p, q) in enumerate(placements))


def _as_it_is(operator: _torch.Operator, args: tuple[Any, ...], kwargs: dict[str, Any], output: Layout) -> Any:
    """A view of every rank's own part; a copy where the part lies in memory otherwise than the full tensor is said to.

    A part that was gathered or computed from tensors that had to be moved may do so. Only some ranks may have one, and
    if these alone were to complain the others would wait for them.
    """
    local = _torch.local_of(args[0])
    try:
        seen = local.view(output.local_shape)
    except RuntimeError:
        return _copy(_torch.wrap(local.reshape(output.local_shape), output.spec), args[0])
    return _torch.as_view(operator, args, kwargs, _torch.wrap(seen, output.spec))


def _copy(result: DTensor, input: DTensor) -> DTensor:
    shape, before = tuple(result.shape), tuple(input.shape)
    return copy_of(
        result, input, lambda full: aten.view.default(full, shape),
        lambda full, part: aten.view.default(part, before),
    )  # fmt: skip


def _without_elements(spec: _torch.Spec, local: torch.Tensor, shape: tuple[int, ...]) -> DTensor:
    """Every rank has all of nothing; torch divides by its size."""
    layout = Layout.of(spec)
    replicated = (Replicate(),) * layout.mesh.ndim
    output = Layout(layout.mesh, replicated, shape, dense_stride(shape, torch.contiguous_format), layout.dtype)
    return _torch.wrap(local.new_empty(output.local_shape), output.spec)


def _strange(placement: Placement) -> bool:
    return type(placement).__name__ == "_StridedShard"
