"""Max unpooling: values are written to the positions that indices give.

Only the values of the indices tell where that is, anywhere in space. So where space is sharded, batch or channels are
sharded instead: each rank unpools full planes, and the output is redistributed like the input. With fewer planes than
ranks, each value is sent with its index to the owner of its position. Compiled code cannot know how many go where:
there values and indices, which are the small side, are all-gathered, and each rank writes its own output.

torch computes the gradient with `view` and `gather`, whose rules shard other dimensions than space as well.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch
from torch.distributed.tensor.placement_types import Placement, Replicate, Shard

from ... import _torch
from ...comm import owners, route_rows
from ...geometry import Interval, shards
from ...sharding.call import Call, Moved
from ...sharding.errors import Unfit
from ...sharding.layout import Layout, dense_stride
from ...sharding.plan_rule import plan_rule
from ...sharding.registry import Behaviour
from .._core.index_bounds import can_route, check_bounds, raise_on_all_ranks
from .flat_index import coordinates, flatten
from .window import spatial_of

aten = torch.ops.aten


@dataclass(frozen=True)
class OutputPart:
    """What this rank computes of the output."""

    computed: Layout
    first: int  # the first spatial dimension
    sizes: tuple[int, ...]
    own: tuple[Interval, ...]  # what this rank owns of space in `computed`
    routed_dims: tuple[int, ...]  # the mesh dimensions over which values are sent to the owners of their positions


@plan_rule(
    aten.max_unpool2d.default, aten.max_unpool3d.default, asks=can_route,
    behaviour=Behaviour(
        "batch, channels, space",
        "nothing; if space is sharded, an all-to-all of values and indices to batch or channels, and of the output "
        "back, because an index may point anywhere; if both are too small for the ranks, each value to the owner of "
        "its position",
    ),
)  # fmt: skip
def max_unpool(operator: _torch.Operator, input: Layout, indices: Layout, sizes: tuple[int, ...], *rest: Any) -> Call:
    spatial, routes = spatial_of(operator), rest[-1]
    first = input.ndim - spatial
    if first not in (1, 2) or input.shape != indices.shape or len(sizes) != spatial or min(sizes) < 1:
        raise Unfit(f"input and indices do not fit an output of size {sizes}",
                    f"give both (C, *space) or (N, C, *space), and {spatial} sizes")  # fmt: skip
    kept = input.without_partial()
    planes = _shard_planes(kept, first, routes)
    shape = (*input.shape[:first], *sizes)
    output = replace(kept, shape=shape, stride=dense_stride(shape, input.memory_format))
    # Along a mesh dimension that does not shard the planes, each rank writes what it owns of space.
    pairs = zip(planes, kept.placements, strict=True)
    computed = output.placed(p if isinstance(p, Shard) else k for p, k in pairs)
    own = tuple(computed.own(first + axis) for axis in range(spatial)) if computed.present else ()
    routed_dims = tuple(m for m, p in enumerate(planes) if isinstance(p, Shard) and p.dim >= first)
    part = OutputPart(computed, first, sizes, own, routed_dims)
    operands = input.placed(planes), indices.placed(planes)
    is_full = all(len(side) == size for side, size in zip(own, sizes, strict=False))

    def write(values: torch.Tensor, at: torch.Tensor, *rest: Any) -> torch.Tensor:
        if routed_dims:
            return _write_routed(values, at, part)
        if not prod(computed.local_shape):
            return values.new_empty(computed.local_shape)
        unpooled: torch.Tensor = operator(values, at, *rest) if is_full else _write_own(values, at, part)
        return unpooled

    def run(values: torch.Tensor, at: torch.Tensor, *rest: Any) -> torch.Tensor:
        return raise_on_all_ranks(lambda: write(values, at, *rest), at, prod(sizes), operands[1], routed_dims)

    return Call(operands, Moved(computed, output), run)


def _write_routed(values: torch.Tensor, at: torch.Tensor, part: OutputPart) -> torch.Tensor:
    """Send each value to the owner of its position, numbered over all planes, and write what arrives."""
    layout, first, sizes = part.computed, part.first, part.sizes
    volume = prod(sizes)
    owner = torch.zeros_like(at)
    for axis, index in enumerate(coordinates(at, sizes)):
        # The owner's coordinate along each mesh dimension, times the stride of that dimension among the ranks.
        number, mesh_dims = owners(index, layout.shards(first + axis))[0], layout.sharded_dims.get(first + axis, ())
        for mesh_dim in reversed(mesh_dims):
            step = prod(layout.mesh.size(m) for m in part.routed_dims if m > mesh_dim)
            owner += number % layout.mesh.size(mesh_dim) * step
            number = number.div(layout.mesh.size(mesh_dim), rounding_mode="floor")
    owner.masked_fill_((at < 0) | (at >= volume), -1)
    planes = torch.arange(prod(values.shape[:first]), device=at.device).view(*values.shape[:first], *[1] * len(sizes))
    route = route_rows(owner.flatten(), layout.mesh, part.routed_dims)
    places, received = route.send((planes * volume + at).flatten()), route.send(values.flatten())
    extents = [len(side) for side in part.own]
    along = [index - side.start for index, side in zip(coordinates(places % volume, sizes), part.own, strict=True)]
    local = flatten(along, extents) + places.div(volume, rounding_mode="floor") * prod(extents)
    return values.new_zeros(prod(layout.local_shape)).index_copy_(0, local, received).view(layout.local_shape)


def _write_own(values: torch.Tensor, at: torch.Tensor, part: OutputPart) -> torch.Tensor:
    """Write the values whose positions this rank owns."""
    check_bounds(at, prod(part.sizes))
    along = coordinates(at, part.sizes)
    mine = torch.ones_like(at, dtype=torch.bool)
    for index, side in zip(along, part.own, strict=True):
        mine &= (index >= side.start) & (index < side.stop)
    extents = [len(side) for side in part.own]
    local = flatten([index - side.start for index, side in zip(along, part.own, strict=True)], extents)
    # Other ranks' values go to one extra position, which is removed.
    local = torch.where(mine, local, prod(extents)).flatten(part.first)
    padded = values.new_zeros([*values.shape[: part.first], prod(extents) + 1])
    padded.scatter_(-1, local, values.flatten(part.first))
    return padded[..., :-1].reshape(*values.shape[: part.first], *extents)


def _shard_planes(input: Layout, first: int, routes: bool) -> tuple[Placement, ...]:
    """Return placements that shard batch or channels in place of space, if every rank gets some of these.

    Otherwise space stays sharded if values can be routed, and is replicated if not.
    """
    placements = list(input.placements)
    for mesh_dim, placement in enumerate(input.placements):
        if isinstance(placement, Shard) and placement.dim >= first:
            taken = {p.dim for p in placements if isinstance(p, Shard)}
            free = [dim for dim in range(first) if dim not in taken]
            enough = (Shard(dim) for dim in free if all(shards(input.shape[dim], (input.mesh.size(mesh_dim),))))
            placements[mesh_dim] = next(enough, placement if routes else Replicate())
    return tuple(placements)
