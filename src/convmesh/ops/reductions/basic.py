"""Reductions over sharded dimensions: every rank reduces its shard, and the small results are all-reduced."""

from __future__ import annotations

from math import inf
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from ... import _torch
from ...sharding.call import Call
from ...sharding.errors import Unfit
from ...sharding.layout import Layout
from ...sharding.partial import is_partial, reduce_once
from ...sharding.plan_rule import plan_rule
from ...sharding.registry import Behaviour
from .plan import Reduction, wide

aten = torch.ops.aten

STAYS = "all dimensions; the result is replicated where a reduced dimension was sharded"
AT_ONCE = "immediate all-reduce of the result, so that every rank can print a loss"
LINEAR = Behaviour(STAYS + "; Partial(sum) and Partial(avg) stay Partial", AT_ONCE)
SUM = Behaviour(LINEAR.stays, f"{AT_ONCE}; in backward the result may stay Partial(sum)")
SMALL = Behaviour(STAYS, "all-reduce of the result")
TWICE = Behaviour(STAYS, "two all-reduces of the result's size")
EXTREME = Behaviour(
    STAYS + "; Partial(max) stays Partial in maxima, Partial(min) in minima",
    "all-reduce of the result",
    "a reduction over no elements",
)


def dims_and_dtype(how: tuple[Any, ...]) -> tuple[Any, bool, torch.dtype | None]:
    """Return (dim, keepdim, dtype) for operators that take all three or only a dtype."""
    return how if len(how) == 3 else (None, False, *how)


def summed_dtype(input: Layout, dtype: torch.dtype | None) -> torch.dtype:
    """Return the dtype of a sum or product."""
    floating = input.dtype.is_floating_point or input.dtype.is_complex
    return dtype or (input.dtype if floating else torch.int64)


@plan_rule(aten.mean.default, aten.mean.dim, behaviour=LINEAR, remembers=True)
def mean(operator: _torch.Operator, input: Layout, *how: Any) -> Call:
    dim, keepdim, requested_dtype = dims_and_dtype(how)
    dtype = requested_dtype or input.dtype
    if not (dtype.is_floating_point or dtype.is_complex):
        raise Unfit(f"there is no mean of dtype {dtype}", "give a floating point dtype")
    plan = Reduction.of(input, dim, keepdim, ("sum", "avg"))

    def run(local: torch.Tensor) -> torch.Tensor:
        if not plan.mesh_dims:
            return local.mean(plan.dims, keepdim=True, dtype=dtype)
        return plan.combine(local.sum(plan.dims, keepdim=True, dtype=wide(dtype))) / plan.count

    return plan.call(run, dtype)


@plan_rule(
    aten.sum.default, aten.sum.dim_IntList, behaviour=SUM, remembers=True, asks=lambda *_: _torch.in_backward()
)  # fmt: skip
def sum_(operator: _torch.Operator, input: Layout, *how: Any) -> Call:
    """Plan a sum, which is all-reduced at once.

    A loss is often printed by one rank alone, which could not reduce it, and is used several times. torch would also
    reduce-scatter a Partial result over another dimension than the input's, and gather activations to match the two. In
    backward the result stays Partial: mostly it is the gradient of a parameter, and these are reduced together.
    """
    *arguments, in_backward = how
    dim, keepdim, requested_dtype = dims_and_dtype(tuple(arguments))
    dtype = summed_dtype(input, requested_dtype)
    plan = Reduction.of(input, dim, keepdim, ("sum", "avg"))
    sum_dtype = wide(dtype) if plan.mesh_dims else dtype
    stays_partial = in_backward and sum_dtype == dtype

    def run(local: torch.Tensor) -> torch.Tensor:
        summed = local.sum(plan.dims, keepdim=True, dtype=sum_dtype)
        return summed if stays_partial else plan.combine(summed)

    return plan.call(run, dtype, output=plan.partial if stays_partial else plan.output)


@plan_rule(
    aten.amax.default, aten.amin.default, aten.max.default, aten.min.default, behaviour=EXTREME, remembers=True
)  # fmt: skip
def extreme(operator: _torch.Operator, input: Layout, dim: Any = None, keepdim: bool = False) -> Call:
    name = _torch.name_of(operator)
    plan = Reduction.of(input, dim, keepdim, (name[-3:],))
    plan.check_not_empty()
    return plan.call(lambda local: extreme_of(plan, local, greatest=name.endswith("max")), input.dtype)


def extreme_of(plan: Reduction, local: torch.Tensor, greatest: bool) -> torch.Tensor:
    """Return the maximum or minimum over all ranks. NaN wins, as on one device."""
    own = local_extreme(plan, local, greatest)
    if not plan.mesh_dims:
        return own
    op = "max" if greatest else "min"
    return plan.combine(own.to(torch.uint8) if own.dtype == torch.bool else own, op).to(own.dtype)


def local_extreme(plan: Reduction, local: torch.Tensor, greatest: bool) -> torch.Tensor:
    """Return the maximum or minimum of this rank's values; if it has none, the value that loses against all others."""
    if local.numel():
        return local.amax(plan.dims, keepdim=True) if greatest else local.amin(plan.dims, keepdim=True)
    shape = [1 if dim in plan.dims else size for dim, size in enumerate(local.shape)]
    return local.new_full(shape, _neutral_element(local.dtype, greatest))


def _neutral_element(dtype: torch.dtype, greatest: bool) -> float | int | bool:
    """The value that loses against all others."""
    if dtype.is_floating_point:
        return -inf if greatest else inf
    if dtype == torch.bool:
        return not greatest
    limits = torch.iinfo(dtype)
    return limits.min if greatest else limits.max


def _summed_gradient(input: Any, *how: Any) -> tuple[Any, ...]:
    """Reduce a Partial gradient for its norm and keep the sum: clipping uses the gradient again afterwards."""
    if isinstance(input, DTensor) and not input.requires_grad and is_partial(input):
        input = reduce_once([input]).get(id(input), input)
    return input, *how


@plan_rule(aten.linalg_vector_norm.default, behaviour=SMALL, remembers=True, adapt=_summed_gradient)
def vector_norm(
    operator: _torch.Operator, input: Layout, order: float, dim: Any, keepdim: bool, dtype: torch.dtype | None
) -> Call:
    plan = Reduction.of(input, dim, keepdim)
    if abs(order) == inf or order < 0:
        plan.check_not_empty()

    def run(local: torch.Tensor) -> torch.Tensor:
        if not plan.mesh_dims:
            return aten.linalg_vector_norm.default(local, order, plan.dims, True, dtype=dtype)  # type: ignore[no-any-return]
        if abs(order) == inf:
            return extreme_of(plan, local.abs(), greatest=order > 0)
        # Powers of the ranks' norms are summed in float64, where those of float32 values do not overflow.
        if not local.numel():  # torch has no negative-order norm of it
            total = plan.combine(local.abs().double().sum(plan.dims, keepdim=True))
        else:
            own = torch.linalg.vector_norm(local, order, plan.dims, True, dtype=wide(dtype or input.dtype)).double()
            total = plan.combine(own if order == 0 else own**order)
        return total if order == 0 else total ** (1 / order)

    return plan.call(run, (dtype or input.dtype).to_real())


@plan_rule(aten.logsumexp.default, behaviour=TWICE, remembers=True)
def logsumexp(operator: _torch.Operator, input: Layout, dim: Any, keepdim: bool) -> Call:
    dtype = input.dtype if input.dtype.is_floating_point else torch.get_default_dtype()
    plan = Reduction.of(input, dim, keepdim)

    def run(local: torch.Tensor) -> torch.Tensor:
        local = local.to(wide(dtype))
        if not plan.mesh_dims:
            return torch.logsumexp(local, plan.dims, keepdim=True)
        # An infinite maximum cannot be subtracted: without a shift the result is that infinity, or NaN, anyway.
        shift = plan.combine(local_extreme(plan, local, greatest=True), "max")
        shift = shift.masked_fill(shift.isinf(), 0.0)
        return plan.combine((local - shift).exp().sum(plan.dims, keepdim=True)).log() + shift

    return plan.call(run, dtype)
