"""Where the extreme value is: the ranks agree on the value first, and then on the first place that has it."""

from __future__ import annotations

from math import prod
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from ... import _torch
from ...sharding.registry import rule
from .basic import TWICE, check_filled, extreme_of, local_extreme
from .plan import Reduction, begin

aten = torch.ops.aten


@rule(aten.argmax.default, aten.argmin.default, behaviour=TWICE)
def argument(operator: _torch.Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> DTensor:
    input, dim, keepdim = _torch.arguments(operator, args, kwargs)
    name = operator._schema.name.removeprefix("aten::")
    plan, local = begin(name, input, dim, keepdim)
    check_filled(name, plan, input)
    if local is None:
        return plan.output.typed(torch.int64).absent(input)
    return plan.wrap(_extreme_and_place(plan, local, name == "argmax")[1], torch.int64)


@rule(aten.max.dim, aten.min.dim, behaviour=TWICE)
def extreme_along(operator: _torch.Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[DTensor, DTensor]:
    input, dim, keepdim = _torch.arguments(operator, args, kwargs)
    name = operator._schema.name.removeprefix("aten::")
    plan, local = begin(name, input, dim, keepdim)
    check_filled(name, plan, input)
    if local is None:
        return plan.output.absent(input), plan.output.typed(torch.int64).absent(input)
    value, place = _extreme_and_place(plan, local, name == "max")
    return plan.wrap(value), plan.wrap(place, torch.int64)


def _extreme_and_place(plan: Reduction, local: torch.Tensor, greatest: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """The extreme value and the first global index that has it, along one dimension or in the flattened input."""
    value = extreme_of(plan, local, greatest)
    nowhere = prod(plan.operand.shape[dim] for dim in plan.dims)
    if not local.numel():
        place = torch.full_like(value, nowhere, dtype=torch.int64)
    else:
        along = plan.dims[0] if len(plan.dims) == 1 else None
        chosen = torch.argmax if greatest else torch.argmin
        numbers = local.byte() if local.dtype == torch.bool else local  # which torch takes no argument of
        first = chosen(numbers, along, keepdim=True) if local.dim() else chosen(numbers)
        own = local_extreme(plan, local, greatest)
        holds = (own == value) | ((own != own) & (value != value))
        place = torch.where(holds, _globally(plan, first), nowhere)
    return value, plan.combine(place, "min")


def _globally(plan: Reduction, place: torch.Tensor) -> torch.Tensor:
    """The index in the full tensor of one in the local tensor. Both count along the reduced dimensions in order."""
    result = torch.zeros_like(place)
    step = 1
    for dim in reversed(plan.dims):
        own = plan.operand.own(dim)
        result += (place % len(own) + own.start) * step
        place = place // len(own)
        step *= plan.operand.shape[dim]
    return result
