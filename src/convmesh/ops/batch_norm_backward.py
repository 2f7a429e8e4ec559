"""The gradients of batch norm: two sums by channel over all ranks, and the rest is local."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from .. import _torch
from ..sharding.cache import planned
from ..sharding.dispatch import check_placed, move, move_beside
from ..sharding.layout import Layout
from ..sharding.registry import rule
from .batch_norm import BACKWARD, plan_batch_norm
from .norm_core import Spread, all_absent, parameter_gradient, place_parameters
from .reduce_plan import wrap_dense

aten = torch.ops.aten


@dataclass(frozen=True)
class BackwardPlan:
    input: Layout
    weight: Layout | None
    statistics: Layout
    spread: Spread
    parameter: tuple[Layout, Layout]  # where the gradients of weight and bias are, and where they go
    present: bool


@planned
def plan_backward(
    training: bool, input: _torch.Spec, weight: _torch.Spec | None, *running: _torch.Spec | None
) -> BackwardPlan:
    forward = plan_batch_norm("batch_norm_backward", training, input, weight, None, *running)
    x, w = forward.operands[:2]
    assert x is not None
    plain = forward.statistics.typed(x.dtype if weight is None else Layout.of(weight).dtype)
    parameter = plain if weight is None else Layout.of(weight)
    return BackwardPlan(
        x, w, forward.statistics, forward.spread,
        parameter_gradient(parameter, x, plain, pending=not training), forward.present,
    )  # fmt: skip


def _backward(
    gradient: Any, input: Any, weight: Any, running: tuple[Any, Any], saved: tuple[Any, Any], training: bool,
    eps: float, mask: tuple[bool, ...],
) -> tuple[DTensor | None, ...]:  # fmt: skip
    mean, rstd = saved
    names = ("grad_output", "input", "weight", "running_mean", "running_var", "save_mean", "save_invstd")
    check_placed("batch_norm_backward", tuple(zip(names, (gradient, input, weight, *running, *saved), strict=True)))
    specs = (None if t is None else _torch.spec_of(t) for t in (input, weight, *running))
    plan = plan_backward(training, *specs)
    if not plan.present:
        return all_absent(input, (plan.input, plan.parameter[1], plan.parameter[1]), mask)
    gy, x, w = move_beside(gradient, plan.input), move(input, plan.input), move(weight, plan.weight)
    if training:
        mean, rstd = (move(t, plan.statistics) for t in (mean, rstd))
    else:
        mean, var = (move(t, plan.statistics.typed(t.dtype)).to(plan.statistics.dtype) for t in running)
        rstd = (var + eps).rsqrt()
    sums = _sums(gy, x, mean, rstd)
    if training:
        sums = plan.spread.add_up(*sums)
    parameters = place_parameters(sums, [plan.parameter] * 2, mask[1:])
    if not mask[0]:
        return None, *parameters
    gx = _input_gradient(plan, gy, x, w, mean, rstd, sums if training else None)
    return wrap_dense(gx, plan.input.dense), *parameters


def _sums(gy: torch.Tensor, x: torch.Tensor, mean: torch.Tensor, rstd: torch.Tensor) -> Any:
    """[N C space] [N C space] [C] [C] -> [C] [C]: of the gradient times the normalised input, and of the gradient."""
    if not x.numel():
        return torch.zeros_like(mean), torch.zeros_like(mean)
    arguments = (gy.to(mean.dtype), x.to(mean.dtype), None, None, None, mean, rstd, True, 0.0, [False, True, True])
    return aten.native_batch_norm_backward.default(*arguments)[1:]


def _input_gradient(
    plan: BackwardPlan, gy: torch.Tensor, x: torch.Tensor, w: Any, mean: torch.Tensor, rstd: torch.Tensor, sums: Any
) -> torch.Tensor:
    def by_channel(numbers: torch.Tensor) -> torch.Tensor:
        return numbers.view(-1, *[1] * (x.dim() - 2))

    scale = by_channel(rstd if w is None else rstd * w)
    if sums is None:
        return gy * scale
    with_normal, plain = (t / plan.spread.count for t in sums)
    result = x - by_channel(mean)
    return result.mul_(by_channel(-rstd * with_normal)).sub_(by_channel(plain)).add_(gy).mul_(scale)


@rule(aten.native_batch_norm_backward.default, behaviour=BACKWARD)
def native_backward(
    operator: _torch.Operator, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[DTensor | None, ...]:
    gradient, input, weight, *rest, training, eps, mask = _torch.arguments(operator, args, kwargs)
    return _backward(gradient, input, weight, tuple(rest[:2]), tuple(rest[2:]), training, eps, tuple(mask))


@rule(aten.batch_norm_backward.default, behaviour=BACKWARD)
def update_backward(
    operator: _torch.Operator, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[DTensor | None, ...]:
    gradient, input, weight, *rest, training, eps, mask, _ = _torch.arguments(operator, args, kwargs)
    return _backward(gradient, input, weight, tuple(rest[:2]), tuple(rest[2:]), training, eps, tuple(mask))


@rule(aten.cudnn_batch_norm_backward.default, aten.miopen_batch_norm_backward.default, behaviour=BACKWARD)
def cudnn_backward(
    operator: _torch.Operator, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[DTensor | None, ...]:
    input, gradient, weight, *rest = _torch.arguments(operator, args, kwargs)[:8]
    eps = rest.pop()
    return _backward(gradient, input, weight, tuple(rest[:2]), tuple(rest[2:]), True, eps, (True, True, True))
