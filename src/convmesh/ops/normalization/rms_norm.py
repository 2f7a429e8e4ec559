"""RMS norm as one operator, as devices have it that fuse it. Elsewhere torch makes it of a mean and products."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor

from ... import _torch
from ...comm import all_reduce
from ...sharding.layout import all_absent
from ...sharding.redistribute import check_placed, move, move_beside
from ...sharding.registry import Behaviour, rule
from ..reductions.plan import wide
from .common import place_parameters
from .layer_norm import LayerNormPlan, plan_layer_norm

aten = torch.ops.aten

TRAVELS = "nothing; all-reduce of one number a row where normalised dimensions are cut"
BEHAVIOUR = Behaviour("all dimensions", TRAVELS)


def _plan(input: Any, shape: Any, weight: Any, *more: tuple[str, Any]) -> LayerNormPlan:
    check_placed("rms_norm", (("input", input), ("weight", weight), *more))
    weight_spec = None if weight is None else _torch.spec_of(weight)
    return plan_layer_norm("rms_norm", tuple(int(size) for size in shape), _torch.spec_of(input), weight_spec, None)


@rule(aten._fused_rms_norm.default, behaviour=BEHAVIOUR)
def rms_norm(operator: _torch.Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[DTensor, DTensor]:
    input, shape, weight, eps = _torch.arguments(operator, args, kwargs)
    plan = _plan(input, shape, weight)
    if not plan.output.present:
        return plan.output.absent(input), plan.statistics.absent(input)
    x, w = (move(tensor, target) for tensor, target in zip((input, weight), plan.operands, strict=False))
    if not plan.spread.mesh_dims:
        y, rstd = operator(x, list(shape), w, eps)
        return plan.output.wrap(y), _torch.wrap(rstd, plan.statistics.typed(rstd.dtype).spec)
    x = x.to(plan.statistics.dtype)
    square = _summed(plan, x.square()) / plan.spread.count
    rstd = (square + (torch.finfo(input.dtype).eps if eps is None else eps)).rsqrt()
    y = x * rstd
    return plan.output.wrap(y if w is None else y.mul_(w)), _torch.wrap(rstd, plan.statistics.spec)


@rule(aten._fused_rms_norm_backward.default, behaviour=BEHAVIOUR)
def rms_norm_backward(
    operator: _torch.Operator, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[DTensor | None, ...]:
    gradient, input, shape, rstd, weight, mask = _torch.arguments(operator, args, kwargs)
    plan = _plan(input, shape, weight, ("grad_output", gradient), ("rstd", rstd))
    if not plan.output.present:
        return all_absent((plan.output, plan.parameters[0][1]), input, mask)
    x, w = (move(tensor, target) for tensor, target in zip((input, weight), plan.operands, strict=False))
    gy = move_beside(gradient, plan.output).to(wide(input.dtype))
    r = move(rstd, plan.statistics.typed(rstd.dtype))
    normal = x * r
    scaled = gy if w is None else gy * w
    for_weight = (gy * normal).sum(plan.outer) if plan.outer else gy * normal
    mean = _summed(plan, scaled * normal) / plan.spread.count
    gx = (scaled - normal.mul_(mean)).mul_(r)
    for_input = plan.output.wrap(gx) if mask[0] else None
    return for_input, *place_parameters([for_weight], plan.parameters[:1], mask[1:])


def _summed(plan: LayerNormPlan, values: torch.Tensor) -> torch.Tensor:
    return all_reduce(values.sum(plan.inner, keepdim=True), plan.output.mesh, plan.spread.mesh_dims)
