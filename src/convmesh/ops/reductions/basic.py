"""Reductions over sharded dimensions: every rank reduces what it has, and the small results are put together."""

from __future__ import annotations

from math import inf
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from ... import _torch
from ...sharding.errors import refuse
from ...sharding.partial import is_pending, reduce_once
from ...sharding.registry import Behaviour, rule
from .plan import Reduction, begin, wide

aten = torch.ops.aten

STAYS = "all dimensions; reduced ones come out replicated"
AT_ONCE = "all-reduce of the result, at once: every rank can print a loss"
LINEAR = Behaviour(STAYS + "; Partial sums and averages stay Partial", AT_ONCE)
SUM = Behaviour(STAYS + "; Partial sums and averages stay Partial", f"{AT_ONCE} (later in backward)")
SMALL = Behaviour(STAYS, "all-reduce of the result")
TWICE = Behaviour(STAYS, "two all-reduces of the result's size")
EXTREME = Behaviour(
    STAYS + "; a Partial extreme of the same kind stays Partial", "all-reduce of the result", "reducing over nothing"
)


@rule(aten.mean.default, aten.mean.dim, behaviour=LINEAR)
def mean(operator: _torch.Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> DTensor:
    input, *rest = _torch.arguments(operator, args, kwargs)
    dim, keepdim, dtype = rest if len(rest) == 3 else (None, False, *rest)
    dtype = dtype or input.dtype
    if not (dtype.is_floating_point or dtype.is_complex):
        raise refuse("mean", f"there is no mean of dtype {dtype}", [("input", input)], "give a floating point dtype")
    plan, local = begin("mean", input, dim, keepdim, ("sum", "avg"))
    if local is None:
        return plan.output.typed(dtype).absent(input)
    if not plan.mesh_dims:
        return plan.wrap(local.mean(plan.dims, keepdim=True, dtype=dtype), dtype)
    total = plan.combine(local.sum(plan.dims, keepdim=True, dtype=wide(dtype)))
    return plan.wrap(total / plan.count, dtype)


@rule(aten.sum.default, aten.sum.dim_IntList, behaviour=SUM)
def total(operator: _torch.Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> DTensor:
    """Reduced at once: a loss is often printed by one rank alone, which could not reduce it, and is used several times.
    torch would also scatter a Partial result over another dimension than the input's, and gather activations to bring
    the two together again. In backward it is mostly the gradient of a parameter, and these are reduced together."""
    input, *rest = _torch.arguments(operator, args, kwargs)
    dim, keepdim, dtype = rest if len(rest) == 3 else (None, False, *rest)
    floating = input.dtype.is_floating_point or input.dtype.is_complex
    dtype = dtype or (input.dtype if floating else torch.int64)
    plan, local = begin("sum", input, dim, keepdim, ("sum", "avg"))
    if local is None:
        return plan.output.typed(dtype).absent(input)
    summed = local.sum(plan.dims, keepdim=True, dtype=wide(dtype) if plan.mesh_dims else dtype)
    if plan.mesh_dims and _torch.in_backward() and summed.dtype == dtype:
        return plan.wrap(summed, dtype, pending=True)
    return plan.wrap(plan.combine(summed), dtype)


@rule(aten.amax.default, aten.amin.default, aten.max.default, aten.min.default, behaviour=EXTREME)
def extreme(operator: _torch.Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> DTensor:
    input, *rest = _torch.arguments(operator, args, kwargs)
    dim, keepdim = rest or (None, False)
    name = operator._schema.name.removeprefix("aten::")
    plan, local = begin(name, input, dim, keepdim, (name[-3:],))
    check_filled(name, plan, input)
    if local is None:
        return plan.output.absent(input)
    return plan.wrap(extreme_of(plan, local, greatest=name.endswith("max")))


def check_filled(name: str, plan: Reduction, input: DTensor) -> None:
    if plan.count == 0 and 0 not in plan.output.shape:
        raise refuse(name, "it would reduce over no values", [("input", input)], "give an input that has values")


def extreme_of(plan: Reduction, local: torch.Tensor, greatest: bool) -> torch.Tensor:
    """The greatest or least value of all ranks. A NaN wins, as it does on one device."""
    own = local_extreme(plan, local, greatest)
    if not plan.mesh_dims:
        return own
    op = "max" if greatest else "min"
    return plan.combine(own.to(torch.uint8) if own.dtype == torch.bool else own, op).to(own.dtype)


def local_extreme(plan: Reduction, local: torch.Tensor, greatest: bool) -> torch.Tensor:
    """Of this rank's values; where it has none, what loses against every value."""
    if local.numel():
        return local.amax(plan.dims, keepdim=True) if greatest else local.amin(plan.dims, keepdim=True)
    shape = [1 if dim in plan.dims else size for dim, size in enumerate(local.shape)]
    return local.new_full(shape, _loser(local.dtype, greatest))


def _loser(dtype: torch.dtype, greatest: bool) -> float | int | bool:
    if dtype.is_floating_point:
        return -inf if greatest else inf
    if dtype == torch.bool:
        return not greatest
    limits = torch.iinfo(dtype)
    return limits.min if greatest else limits.max


@rule(aten.linalg_vector_norm.default, behaviour=SMALL)
def vector_norm(operator: _torch.Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> DTensor:
    input, order, dim, keepdim, dtype = _torch.arguments(operator, args, kwargs)
    if not input.requires_grad and is_pending(input):  # a gradient that is clipped is used again afterwards
        input = reduce_once([input]).get(id(input), input)
    plan, local = begin("linalg_vector_norm", input, dim, keepdim)
    if abs(order) == inf or order < 0:
        check_filled("linalg_vector_norm", plan, input)
    result = (dtype or input.dtype).to_real()
    if local is None:
        return plan.output.typed(result).absent(input)
    if not plan.mesh_dims:
        return plan.wrap(torch.linalg.vector_norm(local, order, plan.dims, True, dtype=dtype), result)
    if abs(order) == inf:
        return plan.wrap(extreme_of(plan, local.abs(), greatest=order > 0), result)
    # Powers of the ranks' norms are added up in float64, in which those of float32 values do not overflow.
    if not local.numel():  # torch has no negative norm of nothing
        total = plan.combine(local.abs().double().sum(plan.dims, keepdim=True))
    else:
        own = torch.linalg.vector_norm(local, order, plan.dims, True, dtype=wide(dtype or input.dtype)).double()
        total = plan.combine(own if order == 0 else own**order)
    return plan.wrap(total if order == 0 else total ** (1 / order), result)


@rule(aten.logsumexp.default, behaviour=TWICE)
def logsumexp(operator: _torch.Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> DTensor:
    input, dim, keepdim = _torch.arguments(operator, args, kwargs)
    dtype = input.dtype if input.dtype.is_floating_point else torch.get_default_dtype()
    plan, local = begin("logsumexp", input, dim, keepdim)
    if local is None:
        return plan.output.typed(dtype).absent(input)
    local = local.to(wide(dtype))
    if not plan.mesh_dims:
        return plan.wrap(torch.logsumexp(local, plan.dims, keepdim=True), dtype)
    # Where the greatest is infinite it is no shift: the result is that infinity, or NaN, by itself.
    shift = plan.combine(local_extreme(plan, local, greatest=True), "max")
    shift = shift.masked_fill(shift.isinf(), 0.0)
    return plan.wrap(plan.combine((local - shift).exp().sum(plan.dims, keepdim=True)).log() + shift, dtype)
