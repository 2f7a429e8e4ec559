"""Planning copies of one tensor: where its operand has to be, where the result lies, and what this rank copies."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from ... import _torch
from ...geometry import IndexMap
from ...sharding.layout import Layout, dense_stride
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
    remap: Remap | None  # None where no dimension that is sharded is mapped: then the stock operator does it


@planned
def plan_copy(spec: _torch.Spec, recipe: Recipe, *numbers: Hashable) -> CopyPlan:
    layout = Layout.of(spec)
    return copy_plan(layout, recipe(layout, *numbers), ("sum", "avg", "max", "min"))


def copy_plan(layout: Layout, maps: Maps, partial: tuple[str, ...] = ("sum",)) -> CopyPlan:
    """What is copied may be Partial in any way. Its adjoint, which adds, wants a sum."""
    source = layout.without_partial(*partial)
    shape = tuple(maps[dim].size if dim in maps else size for dim, size in enumerate(layout.shape))
    output = replace(source, shape=shape, stride=dense_stride(shape, layout.memory_format))
    remap = Remap.of(source, maps) if layout.present and source.sharded_over(maps) else None
    return CopyPlan(source, output, remap)


def copy(
    operator: str, input: Any, recipe: Recipe, numbers: tuple[Hashable, ...], stock: Stock, fill: Fill = 0,
    alone: Callable[[_torch.Spec], Stock | None] = lambda spec: None,
) -> DTensor:  # fmt: skip
    """Run a copy; `stock(local, fill)` does it where none of the mapped dimensions is sharded, and what
    `alone` returns, if anything, where they are not and yet this rank needs nothing of others."""
    (spec,) = check_placed(operator, (("input", input),))
    plan = plan_copy(spec, recipe, *numbers)
    if not plan.output.present:
        return plan.output.absent(input)
    x = move(input, plan.source)
    value = fill if plan.source.adds_once else 0
    if plan.remap is not None:
        by_itself = alone(spec)
        y = plan.remap([x], value) if by_itself is None else by_itself(x, value)
    elif not prod(plan.output.local_shape):
        y = x.new_empty(plan.output.local_shape)  # torch refuses some empty tensors, and would do nothing for them
    else:
        y = stock(x, value)
    return plan.output.wrap(y)
