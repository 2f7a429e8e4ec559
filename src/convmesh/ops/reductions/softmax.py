"""Softmax and log-softmax along a dimension that may be sharded: only its maximum and its sum are all-reduced."""

from __future__ import annotations

import torch

from ... import _torch
from ...sharding.call import Call
from ...sharding.layout import Layout
from ...sharding.plan_rule import plan_rule
from ...sharding.registry import Behaviour, made_of_others
from .basic import local_extreme
from .plan import Reduction, wide

aten = torch.ops.aten

FORWARD = Behaviour("all dimensions", "nothing; two all-reduces of one value per row if rows are sharded")
BACKWARD = Behaviour("all dimensions", "nothing; all-reduce of one value per row if rows are sharded")

made_of_others(aten.softmax.int, aten.log_softmax.int)


@plan_rule(aten._softmax.default, aten._log_softmax.default, behaviour=FORWARD, remembers=True)
def softmax(operator: _torch.Operator, input: Layout, dim: int, half_to_float: bool) -> Call:
    plan = Reduction.of(input, dim, True)

    def run(local: torch.Tensor, *how: object) -> torch.Tensor:
        local = local.to(wide(local.dtype))
        shifted = local - plan.combine(local_extreme(plan, local, greatest=True), "max")
        powers = shifted.exp()
        total = plan.combine(powers.sum(plan.dims, keepdim=True))
        return shifted - total.log() if operator is aten._log_softmax.default else powers / total

    output = plan.operand.typed(torch.float32 if half_to_float else input.dtype)
    return Call((plan.operand,), output, run if plan.mesh_dims else operator)


@plan_rule(aten._softmax_backward_data.default, aten._log_softmax_backward_data.default, behaviour=BACKWARD)
def softmax_backward(
    operator: _torch.Operator, gradient: Layout, output: Layout, dim: int, input_dtype: torch.dtype
) -> Call:
    plan = Reduction.of(output, dim, True)

    def run(gy: torch.Tensor, y: torch.Tensor, *how: object) -> torch.Tensor:
        gy, y = (tensor.to(wide(tensor.dtype)) for tensor in (gy, y))
        if operator is aten._log_softmax_backward_data.default:
            return gy - y.exp() * plan.combine(gy.sum(plan.dims, keepdim=True))
        return y * (gy - plan.combine((gy * y).sum(plan.dims, keepdim=True)))

    operands = gradient.placed(plan.operand.placements), plan.operand
    return Call(operands, plan.operand.typed(input_dtype), run if plan.mesh_dims else operator)
