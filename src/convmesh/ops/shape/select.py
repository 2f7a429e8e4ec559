"""One index of a dimension: `select` and its gradient.

The owner sends the index to the other ranks, so that the result is replicated along the mesh dimensions that shard the
dimension. A Partial(sum) would send nothing at first, but would be reduced by each of its users again, and loses
what a sum cannot carry (bools, the sign of zero).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Partial, Placement, Replicate, Shard

from ... import _torch
from ...comm import Schedule, broadcast_from_owner, fetch, rank_line
from ...geometry import Interval
from ...sharding.errors import refuse
from ...sharding.gradient_placements import Hints
from ...sharding.layout import Layout, dense_stride, reduced
from ...sharding.local_views import local_view_rule
from ...sharding.plan_cache import planned
from ...sharding.redistribute import check_placed, move
from ...sharding.registry import Behaviour, rule
from .slice_split import index_of, sharded, view_of

aten = torch.ops.aten

SELECT = Behaviour("all other dimensions", "the one index, from its owner to all")


@dataclass(frozen=True)
class SelectPlan:
    source: Layout
    output: Layout
    schedule: Schedule | None  # None where every rank has the full dimension
    own: Interval
    here: bool


@planned
def plan_select(spec: _torch.Spec, dim: int, index: int) -> SelectPlan:
    layout = Layout.of(spec)
    size = layout.shape[dim]
    if not -size <= index < size:
        raise refuse("select", f"dimension {dim} has no index {index}", (("input", layout),), "give one that it has")
    source = layout.without_partial("sum")
    mesh_dims = tuple(m for m in source.sharded_dims.get(dim, ()) if source.mesh.size(m) > 1)
    here = source.mesh.get_coordinate() is not None
    schedule = None
    if here and mesh_dims:
        schedule = broadcast_from_owner(rank_line(source.mesh, mesh_dims), size, index % size)
    own = source.own(dim) if here else Interval(0, 0)
    return SelectPlan(source, source.without((dim,)), schedule, own, here)


def _local_select(operator: _torch.Operator, spec: _torch.Spec, dim: int, index: int) -> Layout | None:
    """Where an index of a dimension lies that is not sharded; None where only torch's DTensor knows, or complains."""
    layout = Layout.of(spec)
    plain = _torch.plain_order(spec) and layout.mesh.get_coordinate() is not None
    dim %= max(1, layout.ndim)
    if not plain or not layout.shape or not -layout.shape[dim] <= index < layout.shape[dim]:
        return None
    if dim in layout.sharded_dims:
        return None
    return replace(layout.without((dim,)), stride=(*layout.stride[:dim], *layout.stride[dim + 1 :]))


_sharded_before = Hints()


@planned
def plan_local_select(spec: _torch.Spec, dim: int, index: int) -> Layout | None:
    return _local_select(aten.select.int, spec, dim, index)


@local_view_rule(aten.select.int, behaviour=SELECT, where=_local_select)
def select(operator: _torch.Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    input, dim, index = _torch.arguments(operator, args, kwargs)
    dim %= max(1, input.dim())
    if not sharded(input, dim):
        output = plan_local_select(_torch.spec_of(input), dim, int(index))
        return _torch.stock(operator, args, kwargs) if output is None else view_of(operator, args, kwargs, output)
    check_placed("select", (("input", input),))
    plan = plan_select(_torch.spec_of(input), dim, int(index))
    _sharded_before.remember((input.device_mesh, tuple(input.shape), dim), input.placements)
    if not plan.here:
        return _torch.wrap(_torch.local_of(input).new_empty(0), plan.output.spec)
    x = move(input, plan.source)
    at = int(index) % input.shape[dim]
    one = Interval(at, at + 1)
    local = x.narrow(dim, at, 1) if plan.schedule is None else fetch(plan.schedule, x, (dim,), (plan.own,), (one,))
    local = local.squeeze(dim).clone(memory_format=torch.contiguous_format)
    result = _torch.wrap(_torch.tie(local, x), plan.output.spec)
    return index_of(input, dim, index, result)


@planned
def plan_select_backward(
    spec: _torch.Spec, shape: tuple[int, ...], dim: int, index: int, before: tuple[Placement, ...] | None
) -> tuple[Layout, Layout]:
    """Where the gradient has to be, and where the result lies."""
    gradient = Layout.of(spec)
    if gradient.shape != (*shape[:dim], *shape[dim + 1 :]) or not -shape[dim] <= index < shape[dim]:
        raise refuse("select_backward", f"not the gradient of an index of a tensor of shape {shape}",
                     (("grad_output", gradient),), "give a gradient of the selected shape")  # fmt: skip
    # A Partial would have the size of the full tensor on every rank: the one index is reduced instead.
    was_sharded = [before is not None and at == Shard(dim) for at in before or gradient.placements]
    source = tuple(
        Replicate() if sharded and isinstance(p, Partial) else reduced(p, "sum")
        for p, sharded in zip(gradient.placements, was_sharded, strict=True)
    )
    placements = []
    for mesh_dim, placement in enumerate(source):
        if isinstance(placement, Shard):
            placement = Shard(placement.dim + (placement.dim >= dim))
        elif isinstance(placement, Replicate) and before is not None and before[mesh_dim] == Shard(dim):
            placement = Shard(dim)
        placements.append(placement)
    stride = dense_stride(shape, torch.contiguous_format)
    return gradient.placed(source), Layout(gradient.mesh, tuple(placements), shape, stride, gradient.dtype)


SELECT_BACKWARD = Behaviour(
    "all dimensions, Partial sums",
    "nothing; a Partial sum, of the one index of a dimension that was sharded",
)


@rule(aten.select_backward.default, behaviour=SELECT_BACKWARD)
def select_backward(operator: _torch.Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> DTensor:
    """Everyone has the gradient of the one index, and only its owner has something to write."""
    gradient, sizes, dim, index = _torch.arguments(operator, args, kwargs)
    check_placed("select_backward", (("grad_output", gradient),))
    shape = tuple(map(_torch.known, sizes))
    dim, index = dim % len(shape), int(index)
    before = _sharded_before.recall((gradient.device_mesh, shape, dim))
    source, result = plan_select_backward(_torch.spec_of(gradient), shape, dim, index, before)
    local = move(gradient, source)
    if source.mesh.get_coordinate() is None:
        return _torch.wrap(local.new_empty(0), result.spec)
    zeros = local.new_zeros(result.local_shape)
    own = result.own(dim)
    if index % shape[dim] in own:
        zeros.select(dim, index % shape[dim] - own.start).copy_(local)
    return _torch.wrap(_torch.tie(zeros, local), result.spec)


@rule(
    aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims,
    behaviour=Behaviour("all other dimensions", "nothing; of a sharded dimension its one index, to all"),
)  # fmt: skip
def squeeze(operator: _torch.Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The only index of a sharded dimension is selected; torch's DTensor does the rest."""
    input, *rest = args
    rank = input.dim()
    named = range(rank) if not rest else [rest[0]] if isinstance(rest[0], int) else rest[0]
    dims = [dim % max(1, rank) for dim in named]
    single = sorted((dim for dim in dims if dim < rank and input.shape[dim] == 1), reverse=True)
    # DTensor does not squeeze a tensor that is sharded along a dimension of size 0 either.
    if not any(sharded(input, dim) for dim in single) and 0 not in input.shape:
        return _torch.stock(operator, args, kwargs)
    result = input if single else aten.view.default(input, input.shape)
    for dim in single:
        result = aten.select.int(result, dim, 0)
    return result
