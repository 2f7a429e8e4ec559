"""Softmax and log-softmax along a dimension that may be sharded: only the two sums along it are put together."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor

from ... import _torch
from ...sharding.redistribute import check_placed, move_beside
from ...sharding.registry import Behaviour, made_of_others, rule
from .basic import local_extreme
from .plan import begin, wide

aten = torch.ops.aten

FORWARD = Behaviour("all dimensions", "nothing; two all-reduces of one number a row if it is sharded")
BACKWARD = Behaviour("all dimensions", "nothing; all-reduce of one number a row if it is sharded")

made_of_others(aten.softmax.int, aten.log_softmax.int)


@rule(aten._softmax.default, aten._log_softmax.default, behaviour=FORWARD)
def softmax(operator: _torch.Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> DTensor:
    input, dim, half_to_float = _torch.arguments(operator, args, kwargs)
    plan, local = begin("softmax", input, dim, True)
    output = plan.operand.typed(torch.float32 if half_to_float else input.dtype).dense
    if local is None:
        return output.absent(input)
    if not plan.mesh_dims:
        return output.wrap(operator(local, dim, half_to_float))
    local = local.to(wide(local.dtype))
    shifted = local - plan.combine(local_extreme(plan, local, greatest=True), "max")
    powers = shifted.exp()
    total = plan.combine(powers.sum(plan.dims, keepdim=True))
    return output.wrap(shifted - total.log() if operator is aten._log_softmax.default else powers / total)


@rule(aten._softmax_backward_data.default, aten._log_softmax_backward_data.default, behaviour=BACKWARD)
def softmax_backward(operator: _torch.Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> DTensor:
    gradient, output, dim, input_dtype = _torch.arguments(operator, args, kwargs)
    check_placed("softmax_backward", (("grad_output", gradient), ("output", output)))
    plan, y = begin("softmax_backward", output, dim, True)
    result = plan.operand.typed(input_dtype).dense
    if y is None:
        return result.absent(output)
    gy = move_beside(gradient, plan.operand)
    if not plan.mesh_dims:
        return result.wrap(operator(gy, y, dim, input_dtype))
    gy, y = (tensor.to(wide(tensor.dtype)) for tensor in (gy, y))
    if operator is aten._log_softmax_backward_data.default:
        return result.wrap(gy - y.exp() * plan.combine(gy.sum(plan.dims, keepdim=True)))
    return result.wrap(y * (gy - plan.combine((gy * y).sum(plan.dims, keepdim=True))))
