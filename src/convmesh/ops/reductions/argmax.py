"""argmax and argmin: the ranks first agree on the extreme value, then on the first index that has it."""

from __future__ import annotations

from math import prod

import torch

from ... import _torch
from ...sharding.call import Call
from ...sharding.layout import Layout
from ...sharding.plan_rule import plan_rule
from .basic import TWICE, extreme_of, local_extreme
from .plan import Reduction

aten = torch.ops.aten


@plan_rule(aten.argmax.default, aten.argmin.default, behaviour=TWICE, remembers=True)
def argument(operator: _torch.Operator, input: Layout, dim: int | None, keepdim: bool) -> Call:
    plan = Reduction.of(input, dim, keepdim)
    plan.check_filled()
    greatest = operator is aten.argmax.default
    return plan.call(lambda local: _extreme_and_place(plan, local, greatest)[1], torch.int64)


@plan_rule(aten.max.dim, aten.min.dim, behaviour=TWICE, remembers=True)
def extreme_along(operator: _torch.Operator, input: Layout, dim: int, keepdim: bool) -> Call:
    plan = Reduction.of(input, dim, keepdim)
    plan.check_filled()
    greatest = operator is aten.max.dim
    return plan.call(lambda local: _extreme_and_place(plan, local, greatest), input.dtype, torch.int64)


def _extreme_and_place(plan: Reduction, local: torch.Tensor, greatest: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the extreme value and the first global index that has it (in the flattened input, if all is reduced)."""
    value = extreme_of(plan, local, greatest)
    nowhere = prod(plan.operand.shape[dim] for dim in plan.dims)
    if not local.numel():
        place = torch.full_like(value, nowhere, dtype=torch.int64)
    else:
        along = plan.dims[0] if len(plan.dims) == 1 else None
        chosen = torch.argmax if greatest else torch.argmin
        numbers = local.byte() if local.dtype == torch.bool else local  # torch has no argmax of bools
        first = chosen(numbers, along, keepdim=True) if local.dim() else chosen(numbers)
        own = local_extreme(plan, local, greatest)
        holds = (own == value) | ((own != own) & (value != value))
        place = torch.where(holds, _globally(plan, first), nowhere)
    return value, plan.combine(place, "min")


def _globally(plan: Reduction, place: torch.Tensor) -> torch.Tensor:
    """Convert an index into the local tensor to one into the full tensor. Both are flat over the reduced dimensions."""
    result = torch.zeros_like(place)
    step = 1
    for dim in reversed(plan.dims):
        own = plan.operand.own(dim)
        result += (place % len(own) + own.start) * step
        place = place // len(own)
        step *= plan.operand.shape[dim]
    return result
