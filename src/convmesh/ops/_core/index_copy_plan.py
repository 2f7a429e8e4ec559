"""Planning copies of one tensor: where its operand has to be, where the result lies, and what this rank copies."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Partial, Placement, Replicate

from ... import _torch
from ...geometry import IndexMap
from ...sharding.layout import Layout, dense_stride, is_plain, is_sum
from ...sharding.plan_cache import planned
from ...sharding.redistribute import check_placed, move
from .index_copy import Fill, Remap

Maps = dict[int, IndexMap]
Recipe = Callable[..., Maps]
"""Makes index maps from a layout and an operator's numbers, or refuses them."""
Stock = Callable[[torch.Tensor, Fill], torch.Tensor]


@dataclass(frozen=True)
class CopyPlan:
    """A copy along some dimensions that leaves all placements as they are."""

    source: Layout
    output: Layout
    remap: Remap | None  # None where no dimension that is cut is mapped: then the stock operator does it
    here: bool  # whether this rank is part of the mesh
    fills: bool  # of a Partial(sum)'s ranks, one only has the fill value: they are added up


@planned
def plan_copy(spec: _torch.Spec, recipe: Recipe, *numbers: Hashable) -> CopyPlan:
    layout = Layout.of(spec)
    return copy_plan(layout, recipe(layout, *numbers), ("sum", "avg", "max", "min"))


def copy_plan(layout: Layout, maps: Maps, partial: tuple[str, ...] = ("sum",)) -> CopyPlan:
    """What is copied may be Partial in any way. Its adjoint, which adds, wants a sum."""
    source = layout.placed(
        tuple(p if type(p) is Partial and p.reduce_op in partial else settled(p) for p in layout.placements)
    )
    shape = tuple(maps[dim].size if dim in maps else size for dim, size in enumerate(layout.shape))
    stride = dense_stride(shape, layout.memory_format)
    output = Layout(layout.mesh, source.placements, shape, stride, layout.dtype)
    here = layout.mesh.get_coordinate()
    fills = here is not None and not any(
        here[mesh_dim] for mesh_dim, placement in enumerate(source.placements) if is_sum(placement)
    )
    travels = any(layout.mesh.size(m) > 1 for dim in maps for m in source.cuts.get(dim, ()))
    remap = Remap.of(source, maps) if here is not None and travels else None
    return CopyPlan(source, output, remap, here is not None, fills)


def settled(placement: Placement) -> Placement:
    """A pending sum may be copied as it is; any other pending reduction is done first."""
    return placement if is_plain(placement) else Replicate()


def copy(
    operator: str, input: Any, recipe: Recipe, numbers: tuple[Hashable, ...], stock: Stock, fill: Fill = 0,
    alone: Callable[[_torch.Spec], Stock | None] = lambda spec: None,
) -> DTensor:  # fmt: skip
    """Run a copy; `stock(local, fill)` does it where all of the mapped dimensions are whole on every rank, and what
    `alone` returns, if anything, where they are not and yet this rank needs nothing of others."""
    (spec,) = check_placed(operator, (("input", input),))
    plan = plan_copy(spec, recipe, *numbers)
    if not plan.here:
        return _torch.wrap(_torch.local_of(input).new_empty(0), plan.output.spec)
    x = move(input, plan.source)
    value = fill if plan.fills else 0
    if plan.remap is not None:
        by_itself = alone(spec)
        y = plan.remap([x], value) if by_itself is None else by_itself(x, value)
    elif not prod(plan.output.local_shape):
        y = x.new_empty(plan.output.local_shape)  # torch refuses some empty tensors, and would do nothing for them
    else:
        y = stock(x, value)
    return _torch.wrap(y.contiguous(memory_format=plan.output.memory_format), plan.output.spec)
