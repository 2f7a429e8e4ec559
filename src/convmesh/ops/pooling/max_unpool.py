"""Max unpooling: values are written to the positions that indices name.

Only the values of the indices say where that is, anywhere in space. So where space is sharded, batch or channels are
sharded instead: each rank unpools full planes, and the output is resharded as the input was. Where there are fewer
planes than ranks, each value is sent with its index to the owner of its position. Compiled code cannot know how many
go where: there values and indices, which are the small side, are all-gathered, and each rank writes its own output.

torch's gradient is `view` and `gather`, whose rules shard other dimensions than space as well.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement, Replicate, Shard

from ... import _torch
from ...comm import owners, routed
from ...geometry import Interval, shards
from ...sharding.errors import refuse
from ...sharding.layout import Layout, dense_stride
from ...sharding.plan_cache import planned
from ...sharding.redistribute import check_placed, move, place
from ...sharding.registry import Behaviour, rule
from .._core.index_bounds import check_within, raised_alike
from .flat_index import coordinates, flatten
from .window import name_of, spatial_of

aten = torch.ops.aten


@dataclass(frozen=True)
class UnpoolPlan:
    operands: tuple[Layout, Layout]
    computed: Layout
    output: Layout
    first: int
    own: tuple[Interval, ...] | None  # what this rank owns of computed space; None on a rank outside of the mesh
    routed: tuple[int, ...]  # the mesh dimensions over which values are sent to where their indices say


@rule(
    aten.max_unpool2d.default,
    aten.max_unpool3d.default,
    behaviour=Behaviour(
        "batch, channels, space",
        "where space is sharded an all-to-all of values, indices and output, because an index may point anywhere: "
        "batch or channels are sharded meanwhile; each value to the owner of its position where both are fewer than "
        "the ranks",
    ),
)
def max_unpool(operator: _torch.Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> DTensor:
    input, indices, sizes, *rest = _torch.arguments(operator, args, kwargs)
    check_placed(name_of(operator), (("input", input), ("indices", indices)))
    sizes = tuple(map(int, sizes))
    specs = _torch.spec_of(input), _torch.spec_of(indices)
    plan = _plan(name_of(operator), *specs, sizes, spatial_of(operator), not _torch.tracing())
    values, at = (move(tensor, layout) for tensor, layout in zip((input, indices), plan.operands, strict=True))
    if plan.own is None:
        return _torch.wrap(values.new_empty(0), plan.output.spec)
    shape = plan.computed.local_shape

    def write() -> torch.Tensor:
        if plan.routed:
            return _write_routed(values, at, sizes, plan)
        if not prod(shape):
            result: torch.Tensor = values.new_empty(shape)
        elif all(len(own) == size for own, size in zip(plan.own or (), sizes, strict=True)):
            result = operator(values, at, sizes, *rest)
        else:
            result = _write_own(values, at, sizes, plan)
        return result

    made = raised_alike(write, at, prod(sizes), plan.operands[1], plan.routed)
    wrapped = place(made, plan.computed, plan.output)
    assert wrapped is not None, "there is a result"
    return wrapped


def _write_routed(values: torch.Tensor, at: torch.Tensor, sizes: Sequence[int], plan: UnpoolPlan) -> torch.Tensor:
    """Each value is sent to the owner of its position, numbered over all planes."""
    assert plan.own is not None
    layout, first, volume = plan.computed, plan.first, prod(sizes)
    owner = torch.zeros_like(at)
    for axis, index in enumerate(coordinates(at, sizes)):
        # The owner's rank along each mesh dimension, which counts by its step among all ranks.
        number, mesh_dims = owners(index, layout.shards(first + axis))[0], layout.sharded_dims.get(first + axis, ())
        for mesh_dim in reversed(mesh_dims):
            step = prod(layout.mesh.size(m) for m in plan.routed if m > mesh_dim)
            owner += number % layout.mesh.size(mesh_dim) * step
            number = number.div(layout.mesh.size(mesh_dim), rounding_mode="floor")
    owner.masked_fill_((at < 0) | (at >= volume), -1)
    planes = torch.arange(prod(values.shape[:first]), device=at.device).view(*values.shape[:first], *[1] * len(sizes))
    route = routed(owner.flatten(), layout.mesh, plan.routed)
    places, came = route.send((planes * volume + at).flatten()), route.send(values.flatten())
    extents = [len(side) for side in plan.own]
    along = [index - side.start for index, side in zip(coordinates(places % volume, sizes), plan.own, strict=True)]
    local = flatten(along, extents) + places.div(volume, rounding_mode="floor") * prod(extents)
    return values.new_zeros(prod(layout.local_shape)).index_copy_(0, local, came).view(layout.local_shape)


def _write_own(values: torch.Tensor, at: torch.Tensor, sizes: Sequence[int], plan: UnpoolPlan) -> torch.Tensor:
    assert plan.own is not None
    check_within(at, prod(sizes))
    along = coordinates(at, sizes)
    mine = torch.ones_like(at, dtype=torch.bool)
    for index, side in zip(along, plan.own, strict=True):
        mine &= (index >= side.start) & (index < side.stop)
    extents = [len(side) for side in plan.own]
    local = flatten([index - side.start for index, side in zip(along, plan.own, strict=True)], extents)
    # What belongs to other ranks goes to one position more, which is cropped.
    local = torch.where(mine, local, prod(extents)).flatten(plan.first)
    room = values.new_zeros([*values.shape[: plan.first], prod(extents) + 1])
    room.scatter_(-1, local, values.flatten(plan.first))
    return room[..., :-1].reshape(*values.shape[: plan.first], *extents)


@planned
def _plan(
    operator: str,
    input_spec: _torch.Spec,
    indices_spec: _torch.Spec,
    sizes: tuple[int, ...],
    spatial: int,
    routes: bool,
) -> UnpoolPlan:
    input, indices = Layout.of(input_spec), Layout.of(indices_spec)
    first = len(input.shape) - spatial
    if first not in (1, 2) or input.shape != indices.shape or len(sizes) != spatial or min(sizes) < 1:
        raise refuse(operator, f"input and indices do not fit an output of size {sizes}",
                     (("input", input), ("indices", indices)),
                     f"give both (C, *space) or (N, C, *space), and {spatial} sizes")  # fmt: skip
    kept = tuple(p if isinstance(p, Shard) else Replicate() for p in input.placements)
    planes = _planes_instead(input.placed(kept), first, routes)
    shape = (*input.shape[:first], *sizes)
    output = Layout(input.mesh, kept, shape, dense_stride(shape, input.memory_format), input.dtype)
    # Along a mesh dimension that shards no planes, each rank writes what it owns of space.
    computed = output.placed(tuple(p if isinstance(p, Shard) else k for p, k in zip(planes, kept, strict=True)))
    inside = input.mesh.get_coordinate() is not None
    own = tuple(computed.own(first + axis) for axis in range(spatial)) if inside else None
    operands = input.placed(planes), indices.placed(planes)
    routed = tuple(m for m, p in enumerate(planes) if isinstance(p, Shard) and p.dim >= first)
    return UnpoolPlan(operands, computed, output, first, own, routed)


def _planes_instead(input: Layout, first: int, routes: bool) -> tuple[Placement, ...]:
    """Mesh dimensions that shard space shard batch or channels, if every rank gets some of these; else space as before,
    if values can be routed, or nothing."""
    placements = list(input.placements)
    for mesh_dim, placement in enumerate(input.placements):
        if isinstance(placement, Shard) and placement.dim >= first:
            taken = {p.dim for p in placements if isinstance(p, Shard)}
            free = [dim for dim in range(first) if dim not in taken]
            enough = (Shard(dim) for dim in free if all(shards(input.shape[dim], (input.mesh.size(mesh_dim),))))
            placements[mesh_dim] = next(enough, placement if routes else Replicate())
    return tuple(placements)
