"""The gradients of batch norm: two sums by channel over all ranks, and the rest is local."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from ... import _torch
from ...kernels.normalization import Pair, input_gradient, sums_of_channels
from ...sharding.layout import Layout, all_absent
from ...sharding.plan_cache import planned
from ...sharding.redistribute import check_placed, move, move_beside
from ...sharding.registry import rule
from . import synchronized
from .batch_norm import BACKWARD, plan_batch_norm
from .common import Spread, parameter_gradient, place_parameters

aten = torch.ops.aten


@dataclass(frozen=True)
class BackwardPlan:
    input: Layout
    weight: Layout | None
    statistics: Layout
    spread: Spread
    parameter: tuple[Layout, Layout]  # where the gradients of weight and bias are, and where they go
    fused: bool  # by torch's kernels of synchronised norms


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
        parameter_gradient(parameter, x, plain, pending=not training), forward.fused,
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
    if not plan.input.present:
        return all_absent((plan.input, plan.parameter[1], plan.parameter[1]), input, mask)
    gy, x, w = move_beside(gradient, plan.input), move(input, plan.input), move(weight, plan.weight)
    if training:
        mean, rstd = (move(t, plan.statistics) for t in (mean, rstd))
    else:
        mean, var = (move(t, plan.statistics.typed(t.dtype)).to(plan.statistics.dtype) for t in running)
        rstd = (var + eps).rsqrt()
    gx, sums = _gradients(plan, gy, x, w, (mean, rstd), training, mask[0])
    for_input = None if gx is None else plan.input.dense.wrap(gx)
    return for_input, *place_parameters(sums, [plan.parameter] * 2, mask[1:])


def _gradients(
    plan: BackwardPlan, gy: torch.Tensor, x: torch.Tensor, w: Any, moments: Pair, training: bool, for_input: bool
) -> tuple[torch.Tensor | None, Pair]:
    """That of the input, if asked for, and of weight and bias: sums over all ranks if the moments are theirs."""
    if plan.fused and not _torch.tracing():
        return synchronized.gradients(plan.spread, gy, x, w, moments, for_input)

    def by_channel(numbers: torch.Tensor) -> torch.Tensor:
        return numbers.view(-1, *[1] * (x.dim() - 2))

    compiled = plan.spread.compiled()
    plain, products = sums_of_channels(gy, x, *moments, compiled)
    own = products, plain  # as the gradients of weight and bias
    weight = None if w is None else by_channel(w)
    mean, rstd = (by_channel(t) for t in moments)
    if not training:
        return gy * (rstd if weight is None else rstd * weight) if for_input else None, own
    awaited = cache(plan.spread.start_adding_up(*own)) if plan.spread.mesh_dims else lambda: own

    def means() -> Pair:
        products, plain = (by_channel(t / plan.spread.count) for t in awaited())
        return (plain, products) if weight is None else (plain * weight, products * weight)

    return input_gradient(gy, x, (mean, rstd), means, weight, compiled) if for_input else None, awaited()


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
