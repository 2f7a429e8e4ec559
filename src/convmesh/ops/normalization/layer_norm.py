"""Layer norm over trailing dimensions, sharded ones included."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Replicate, Shard

from ... import _torch
from ...kernels.normalization import Pair, input_gradient, moments_of_sets, normalised, sums_by_set
from ...sharding.errors import refuse
from ...sharding.layout import Layout, all_absent
from ...sharding.plan_cache import planned
from ...sharding.redistribute import check_placed, move, move_beside
from ...sharding.registry import Behaviour, made_of_others, rule
from ..reductions.plan import wide
from .common import Named, Spread, arrange, parameter_gradient, place_parameters, rows

aten = torch.ops.aten

made_of_others(aten.layer_norm.default, aten.rms_norm.default)

TRAVELS = "nothing; all-reduce of 2 numbers a row and rank where normalised dimensions are cut"
BEHAVIOUR = Behaviour("all dimensions", TRAVELS)


@dataclass(frozen=True)
class LayerNormPlan:
    operands: tuple[Layout | None, ...]  # input, weight, bias
    output: Layout
    statistics: Layout
    spread: Spread
    outer: tuple[int, ...]  # the dimensions that are not normalised over, and those that are
    inner: tuple[int, ...]
    parameters: tuple[tuple[Layout, Layout], ...]  # where the gradients of weight and bias are, and where they go


@planned
def plan_layer_norm(operator: str, normal_shape: tuple[int, ...], *specs: _torch.Spec | None) -> LayerNormPlan:
    input, weight, bias = (None if spec is None else Layout.of(spec) for spec in specs)
    assert input is not None
    named: Named = (("input", input), ("weight", weight), ("bias", bias))
    axis = len(input.shape) - len(normal_shape)
    if axis < 0 or not normal_shape or input.shape[axis:] != normal_shape:
        raise refuse(operator, f"the input's last sizes are not {normal_shape}", named, "give its trailing sizes")
    for name, given in named[1:]:
        if given is not None and given.shape != normal_shape:
            raise refuse(operator, f"{name} has another shape than {normal_shape}", named, "give it that shape")
    outer, inner = tuple(range(axis)), tuple(range(axis, len(input.shape)))
    operands = arrange(operator, rows(outer, tuple((dim, dim - axis) for dim in inner), 2), named)
    placed = operands[0]
    assert placed is not None
    by_row = tuple(p if isinstance(p, Shard) and p.dim < axis else Replicate() for p in placed.placements)
    beside = tuple(
        Shard(p.dim - axis) if isinstance(p, Shard) and p.dim >= axis else Replicate() for p in placed.placements
    )
    dtype = next((given.dtype for given in (weight, bias) if given is not None), input.dtype)
    whole = input.new(normal_shape, beside, dtype)
    return LayerNormPlan(
        operands, placed.dense, input.new((*input.shape[:axis], *[1] * len(inner)), by_row, wide(input.dtype)),
        Spread.over(placed, inner), outer, inner,
        tuple(parameter_gradient(given or whole, placed, whole, pending=True) for given in (weight, bias)),
    )  # fmt: skip


@rule(aten.native_layer_norm.default, behaviour=BEHAVIOUR)
def layer_norm(operator: _torch.Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[DTensor, ...]:
    input, shape, weight, bias, eps = _torch.arguments(operator, args, kwargs)
    tensors = (input, weight, bias)
    check_placed("layer_norm", tuple(zip(("input", "weight", "bias"), tensors, strict=True)))
    specs = (None if t is None else _torch.spec_of(t) for t in tensors)
    plan = plan_layer_norm("layer_norm", tuple(int(size) for size in shape), *specs)
    if not plan.output.present:
        return tuple(layout.absent(input) for layout in (plan.output, plan.statistics, plan.statistics))
    x, w, b = (move(tensor, target) for tensor, target in zip(tensors, plan.operands, strict=True))
    if not plan.spread.mesh_dims:
        y, mean, rstd = operator(x, list(shape), w, b, eps)
    else:
        y, mean, rstd = _normalise(plan, x, w, b, eps)
    statistics = plan.statistics.typed(mean.dtype).spec
    return plan.output.wrap(y), _torch.wrap(mean, statistics), _torch.wrap(rstd, statistics)


def _normalise(plan: LayerNormPlan, x: torch.Tensor, w: Any, b: Any, eps: float) -> tuple[torch.Tensor, ...]:
    x = x.to(plan.statistics.dtype).contiguous()
    by_row = (*x.shape[: len(plan.outer)], *[1] * len(plan.inner))
    compiled = plan.spread.compiled()
    mean, var = plan.spread.merge(*(t.view(by_row) for t in moments_of_sets(x, prod(by_row), compiled)))
    y = normalised(x, (mean, var), eps, compiled=compiled)
    y = y if w is None else y.mul_(w)
    return (y if b is None else y.add_(b)), mean, (var + eps).rsqrt()


@rule(aten.native_layer_norm_backward.default, behaviour=BEHAVIOUR)
def layer_norm_backward(
    operator: _torch.Operator, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[DTensor | None, ...]:
    gradient, input, shape, mean, rstd, weight, bias, mask = _torch.arguments(operator, args, kwargs)
    names = ("grad_output", "input", "mean", "rstd", "weight", "bias")
    check_placed("layer_norm_backward", tuple(zip(names, (gradient, input, mean, rstd, weight, bias), strict=True)))
    tensors = (input, weight, bias)
    specs = (None if t is None else _torch.spec_of(t) for t in tensors)
    plan = plan_layer_norm("layer_norm_backward", tuple(int(size) for size in shape), *specs)
    if not plan.output.present:
        return all_absent((plan.output, *(wanted for _, wanted in plan.parameters)), input, mask)
    x, w, b = (move(tensor, target) for tensor, target in zip(tensors, plan.operands, strict=True))
    gy = move_beside(gradient, plan.output)
    m, r = (move(t, plan.statistics.typed(t.dtype)) for t in (mean, rstd))
    if not plan.spread.mesh_dims and x.numel():
        gx, *gradients = operator(gy, x, list(shape), m, r, w, b, mask)
    else:
        gx, *gradients = _gradients(plan, gy, x, m, r, w, mask)
    for_input = plan.output.wrap(gx) if mask[0] else None
    return for_input, *place_parameters(gradients, plan.parameters, mask[1:])


def _gradients(
    plan: LayerNormPlan, gy: torch.Tensor, x: torch.Tensor, mean: torch.Tensor, rstd: torch.Tensor, w: Any,
    mask: Sequence[bool],
) -> tuple[Any, ...]:  # fmt: skip
    gy, x = (t.to(mean.dtype) for t in (gy, x))
    compiled = plan.spread.compiled()
    for_input = for_weight = for_bias = None
    if mask[0]:
        scaled = gy if w is None else gy * w
        sums = plan.spread.start_adding_up(*sums_by_set(scaled, x, mean, rstd, compiled))

        def means() -> Pair:
            first, second = sums()
            return first / plan.spread.count, second / plan.spread.count

        for_input = input_gradient(scaled, x, (mean, rstd), means, compiled=compiled)
    if mask[1]:
        for_weight = _over_rows((x - mean).mul_(rstd).mul_(gy), plan)
    if mask[2]:
        for_bias = _over_rows(gy, plan)
    return for_input, for_weight, for_bias


def _over_rows(values: torch.Tensor, plan: LayerNormPlan) -> torch.Tensor:
    return values.sum(plan.outer) if plan.outer else values
