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
def arg_extreme(operator: _torch.Operator, input: Layout, dim: int | None, keepdim: bool) -> Call:
    plan = Reduction.of(input, dim, keepdim)
    plan.check_not_empty()
    greatest = operator is aten.argmax.default
    return plan.call(lambda local: _extreme_and_index(plan, local, greatest)[1], torch.int64)


@plan_rule(aten.max.dim, aten.min.dim, behaviour=TWICE, remembers=True)
def extreme_along(operator: _torch.Operator, input: Layout, dim: int, keepdim: bool) -> Call:
    plan = Reduction.of(input, dim, keepdim)
    plan.check_not_empty()
    greatest = operator is aten.max.dim
    return plan.call(lambda local: _extreme_and_index(plan, local, greatest), input.dtype, torch.int64)


def _extreme_and_index(plan: Reduction, local: torch.Tensor, greatest: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the extreme value and the first global index that has it (in the flattened input, if all is reduced)."""
    value = extreme_of(plan, local, greatest)
    no_index = prod(plan.operand.shape[dim] for dim in plan.dims)
    if not local.numel():
        index = torch.full_like(value, no_index, dtype=torch.int64)
    else:
        along = plan.dims[0] if len(plan.dims) == 1 else None
        arg_function = torch.argmax if greatest else torch.argmin
        numbers = local.byte() if local.dtype == torch.bool else local  # torch has no argmax of bools
        first = arg_function(numbers, along, keepdim=True) if local.dim() else arg_function(numbers)
        own = local_extreme(plan, local, greatest)
        holds = (own == value) | ((own != own) & (value != value))
        index = torch.where(holds, _global_index(plan, first), no_index)
    return value, plan.combine(index, "min")


def _global_index(plan: Reduction, index: torch.Tensor) -> torch.Tensor:
    """Convert an index into the local tensor to one into the full tensor. Both are flat over the reduced dimensions."""
    result = torch.zeros_like(index)
    step = 1
    for dim in reversed(plan.dims):
        own = plan.operand.own(dim)
        result += (index % len(own) + own.start) * step
        index = index // len(own)
        step *= plan.operand.shape[dim]
    return result
