"""Max unpooling: values go to the places that indices name.

Only the numbers say where that is, so values and indices, which are the small side, are made whole in space; each rank
writes its own part of the output, the large side, which stays cut as the input was.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Replicate, Shard

from .. import _torch
from ..geometry import Interval
from ..sharding.cache import planned
from ..sharding.dispatch import check_placed, move
from ..sharding.errors import refuse
from ..sharding.layout import Layout, dense_stride
from ..sharding.registry import Behaviour, rule
from .flat_index import coordinates, flatten
from .pool import name_of, spatial_of

aten = torch.ops.aten


@dataclass(frozen=True)
class UnpoolPlan:
    operands: tuple[Layout, Layout]
    output: Layout
    first: int
    own: tuple[Interval, ...] | None  # this rank's part of space; None on a rank outside of the mesh


@rule(
    aten.max_unpool2d.default,
    aten.max_unpool3d.default,
    behaviour=Behaviour(
        "pooling",
        "batch, channels; the output also in space",
        "values and indices that are sharded in space are made whole, because an index may point anywhere; "
        "the gradient is torch's own view and gather, and likewise whole in space",
        "with a gradient: space that is cut unevenly",
    ),
)
def max_unpool(operator: _torch.Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> DTensor:
    input, indices, sizes, *rest = _torch.arguments(operator, args, kwargs)
    check_placed(name_of(operator), (("input", input), ("indices", indices)))
    sizes = tuple(map(int, sizes))
    specs = (_torch.spec_of(input), _torch.spec_of(indices))
    differentiates = torch.is_grad_enabled() and input.requires_grad
    plan = _plan(name_of(operator), *specs, sizes, spatial_of(operator), differentiates)
    values, at = (move(tensor, layout) for tensor, layout in zip((input, indices), plan.operands, strict=True))
    if plan.own is None:
        return _torch.wrap(values.new_empty(0), plan.output.spec)
    shape = plan.output.local_shape
    if not prod(shape):
        result = values.new_empty(shape)
    elif all(len(own) == size for own, size in zip(plan.own, sizes, strict=True)):
        result = operator(values, at, sizes, *rest)
    else:
        result = _write_own(values, at, sizes, plan)
    return _torch.wrap(result.contiguous(memory_format=plan.output.memory_format), plan.output.spec)


def _write_own(values: torch.Tensor, at: torch.Tensor, sizes: Sequence[int], plan: UnpoolPlan) -> torch.Tensor:
    assert plan.own is not None
    if at.device.type == "cpu" and not _torch.tracing() and bool(((at < 0) | (at >= prod(sizes))).any()):
        raise IndexError(f"max_unpool: an index lies outside of the output's size {tuple(sizes)}")
    along = coordinates(at, sizes)
    mine = torch.ones_like(at, dtype=torch.bool)
    for index, side in zip(along, plan.own, strict=True):
        mine &= (index >= side.start) & (index < side.stop)
    extents = [len(side) for side in plan.own]
    local = flatten([index - side.start for index, side in zip(along, plan.own, strict=True)], extents)
    # What belongs to other ranks goes to one place more, which is cut off.
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
    differentiates: bool,
) -> UnpoolPlan:
    input, indices = Layout.of(input_spec), Layout.of(indices_spec)
    named = (("input", input), ("indices", indices))
    first = len(input.shape) - spatial
    if first not in (1, 2) or input.shape != indices.shape or len(sizes) != spatial or min(sizes) < 1:
        raise refuse(operator, f"input and indices do not fit an output of size {sizes}", named,
                     f"give both (C, *space) or (N, C, *space), and {spatial} sizes")  # fmt: skip
    kept = [p if isinstance(p, Shard) else Replicate() for p in input.placements]
    before = tuple(p if isinstance(p, Shard) and p.dim < first else Replicate() for p in kept)
    shape = (*input.shape[:first], *sizes)
    stride = dense_stride(shape, input.memory_format)
    output = Layout(input.mesh, tuple(kept), shape, stride, input.dtype)
    # torch's gradient flattens space, which DTensor does only of equal shards.
    spaces = [(layout, dim) for layout in (input, indices, output) for dim in layout.cuts if dim >= first]
    if differentiates and any(len({len(part) for part in layout.shards(dim)}) > 1 for layout, dim in spaces):
        raise refuse(operator, "its gradient does not work on spatial dimensions that are cut unevenly", named,
                     "redistribute input and indices to Replicate along space, or do without its gradient")  # fmt: skip
    inside = input.mesh.get_coordinate() is not None
    own = tuple(output.own(first + axis) for axis in range(spatial)) if inside else None
    return UnpoolPlan((input.placed(before), indices.placed(before)), output, first, own)
