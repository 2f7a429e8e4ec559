"""Batch norm: statistics by channel over all of batch and space, however these are sharded."""

from __future__ import annotations

from dataclasses import dataclass
from math import nan
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Partial, Replicate, Shard

from ... import _torch
from ...kernels.normalization import Pair, moments_of_channels, normalised
from ...sharding.errors import refuse
from ...sharding.layout import Layout
from ...sharding.plan_cache import planned
from ...sharding.redistribute import check_placed, move, place
from ...sharding.registry import Behaviour, made_of_others, rule
from ..reductions.plan import wide
from . import synchronized
from .common import Named, Spread, arrange, rows

aten = torch.ops.aten

# The module reads its count of batches as a number where it has no momentum.
made_of_others(aten.batch_norm.default, aten.item.default, aten.is_nonzero.default)

FORWARD = Behaviour("batch, channels, space", "training: all-reduce of 2 C numbers")
BACKWARD = Behaviour("batch, channels, space", "training: all-reduce of 2 C numbers")


@dataclass(frozen=True)
class BatchNormPlan:
    operands: tuple[Layout | None, ...]  # input, weight, bias, and in evaluation the running statistics
    output: Layout
    statistics: Layout
    saved: Layout  # what backward is given of them
    spread: Spread
    fused: bool  # in training, by torch's kernels of synchronised norms
    updates: bool  # these move the running statistics, too


@planned
def plan_batch_norm(operator: str, training: bool, *specs: _torch.Spec | None) -> BatchNormPlan:
    input, weight, bias, mean, var = (None if spec is None else Layout.of(spec) for spec in specs)
    assert input is not None
    named: Named = (("input", input), ("weight", weight), ("bias", bias), ("running_mean", mean), ("running_var", var))
    _check(operator, named, input)
    if not training and (mean is None or var is None):
        raise refuse(operator, "evaluation needs running statistics", named, "give running_mean and running_var")
    kept = named[3:]
    if training:
        named = named[:3]
    dims = len(input.shape)
    operands = arrange(operator, rows((0, *range(2, dims)), ((1, 0),), len(named) - 1), named)
    placed = operands[0]
    assert placed is not None
    by_channel = tuple(Shard(0) if p == Shard(1) else Replicate() for p in placed.placements)
    statistics = input.new((input.shape[1],), by_channel, wide(input.dtype))
    spread = Spread.over(placed, (0, *range(2, dims)))
    return BatchNormPlan(
        operands,
        placed.dense,
        statistics,
        # In evaluation torch saves nothing, since backward has the running statistics.
        statistics if training else statistics.new((0,), statistics.replicated().placements),
        spread,
        fused=training and synchronized.fused(spread, placed, *operands[1:]),
        updates=all(t is not None and (t.placements, t.dtype) == (by_channel, statistics.dtype) for _, t in kept),
    )


def _check(operator: str, named: Named, input: Layout) -> None:
    if len(input.shape) < 2:
        raise refuse(operator, "the input needs batch and channels", named, "give an input of shape (N, C, *space)")
    for name, given in named[1:]:
        if given is not None and given.shape != (input.shape[1],):
            raise refuse(operator, f"{name} needs one number for each of the {input.shape[1]} channels", named,
                         f"give it shape ({input.shape[1]},)")  # fmt: skip
        if name.startswith("running") and given is not None and any(isinstance(p, Partial) for p in given.placements):
            raise refuse(operator, f"{name} is Partial", named, f"redistribute {name} to Replicate first")


@dataclass(frozen=True)
class _Normalised:
    output: DTensor
    mean: DTensor
    rstd: DTensor
    running: tuple[Any, ...]  # the new running statistics, where they are asked for


def _normalise(
    operator: str, input: Any, weight: Any, bias: Any, running: tuple[Any, ...], training: bool, momentum: float,
    eps: float, in_place: bool = True,
) -> _Normalised:  # fmt: skip
    names = ("input", "weight", "bias", "running_mean", "running_var")
    tensors = (input, weight, bias, *running)
    check_placed(operator, tuple(zip(names, tensors, strict=True)))
    plan = plan_batch_norm(operator, training, *(None if t is None else _torch.spec_of(t) for t in tensors))
    if not plan.output.present:
        saved = plan.saved.absent(input)
        return _Normalised(plan.output.absent(input), saved, saved, running)
    x, w, b, *given = (move(tensor, target) for tensor, target in zip(tensors, plan.operands, strict=False))
    if plan.fused and not _torch.tracing():
        return _synchronised(plan, x, w, b, running, momentum, eps, in_place)
    compiled = plan.spread.compiled()
    mean, var = _moments(plan, x, compiled) if training else (t.to(plan.statistics.dtype) for t in given)
    y = _apply(x, w, b, mean, var, eps, compiled)
    statistics = (mean, (var + eps).rsqrt()) if training else (mean.new_empty(0),) * 2
    if training:
        running = _moved(plan, running, mean, var, momentum, in_place)
    saved_mean, saved_rstd = (_torch.wrap(t, plan.saved.spec) for t in statistics)
    return _Normalised(plan.output.wrap(y), saved_mean, saved_rstd, running)


def _moments(plan: BatchNormPlan, x: torch.Tensor, compiled: bool) -> Pair:
    """Mean and variance of each of this rank's channels, over all ranks."""
    mean, var = moments_of_channels(x.to(plan.statistics.dtype), compiled)
    return plan.spread.merge(mean, var) if plan.spread.mesh_dims else (mean, var)


def _apply(
    x: torch.Tensor, w: Any, b: Any, mean: torch.Tensor, var: torch.Tensor, eps: float, compiled: bool
) -> torch.Tensor:
    """[N C space] and numbers by channel -> [N C space]. Half precision inputs take parameters in float32."""
    if not x.numel():
        return x
    w, b = (t if t is None else t.to(mean.dtype) for t in (w, b))
    if x.is_contiguous():
        by_channel = (-1, *[1] * (x.dim() - 2))
        w, b = (t if t is None else t.view(by_channel) for t in (w, b))
        return normalised(x, (mean.view(by_channel), var.view(by_channel)), eps, w, b, compiled)
    result: torch.Tensor = aten.native_batch_norm.default(x, w, b, mean, var, False, 0.0, eps)[0]
    return result


def _synchronised(
    plan: BatchNormPlan, x: torch.Tensor, w: Any, b: Any, running: tuple[Any, ...], momentum: float, eps: float,
    in_place: bool,
) -> _Normalised:  # fmt: skip
    updates = plan.updates and in_place
    local = tuple(_torch.local_of(t) if updates else None for t in running)
    mean, rstd = synchronized.moments(plan.spread, x, local, momentum, eps)
    y = synchronized.normalised(x, w, b, mean, rstd, eps)
    if not updates:
        running = _moved(plan, running, mean, rstd.pow(-2) - eps, momentum, in_place)
    saved_mean, saved_rstd = (_torch.wrap(t, plan.saved.spec) for t in (mean, rstd))
    return _Normalised(plan.output.wrap(y), saved_mean, saved_rstd, running)


def _moved(
    plan: BatchNormPlan,
    running: tuple[Any, ...],
    mean: torch.Tensor,
    var: torch.Tensor,
    momentum: float,
    in_place: bool,
) -> tuple[Any, ...]:
    """The running statistics, after these."""
    count = plan.spread.count
    unbiased = var * (nan if count == 1 else count / max(1, count - 1))  # one value has no variance, as torch has it
    steps = zip(running, (mean, unbiased), strict=True)
    return tuple(_updated(old, value, plan, momentum, in_place) for old, value in steps)


def _updated(old: Any, value: torch.Tensor, plan: BatchNormPlan, momentum: float, in_place: bool) -> Any:
    """A running statistic moved towards the new value, at its own placements."""
    if old is None:
        return None
    there = Layout.of(_torch.spec_of(old))
    at_place = place(value, plan.statistics, plan.statistics.placed(there.placements))
    assert at_place is not None
    step, local = _torch.local_of(at_place), _torch.local_of(old)
    if in_place:
        local.mul_(1 - momentum).add_(step.to(local.dtype), alpha=momentum)
        return old
    return _torch.wrap(local * (1 - momentum) + step.to(local.dtype) * momentum, there.spec)


@rule(
    aten.native_batch_norm.default, aten._native_batch_norm_legit.default, aten.cudnn_batch_norm.default,
    aten.miopen_batch_norm.default, behaviour=FORWARD,
)  # fmt: skip
def batch_norm(operator: _torch.Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[DTensor, ...]:
    input, weight, bias, *running, training, momentum, eps = _torch.arguments(operator, args, kwargs)
    result = _normalise("batch_norm", input, weight, bias, tuple(running), training, momentum, eps)
    reserve = (_reserve(result),) if operator is aten.cudnn_batch_norm.default else ()
    return result.output, result.mean, result.rstd, *reserve


@rule(aten._native_batch_norm_legit.no_stats, behaviour=FORWARD)
def batch_norm_no_stats(
    operator: _torch.Operator, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[DTensor, ...]:
    input, weight, bias, training, momentum, eps = _torch.arguments(operator, args, kwargs)
    result = _normalise("batch_norm", input, weight, bias, (None, None), training, momentum, eps)
    return result.output, result.mean, result.rstd


@rule(aten._native_batch_norm_legit_functional.default, behaviour=FORWARD)
def batch_norm_functional(
    operator: _torch.Operator, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[DTensor, ...]:
    input, weight, bias, *running, training, momentum, eps = _torch.arguments(operator, args, kwargs)
    result = _normalise("batch_norm", input, weight, bias, tuple(running), training, momentum, eps, in_place=False)
    return result.output, result.mean, result.rstd, *result.running


@rule(
    aten._batch_norm_with_update.default, aten._batch_norm_with_update_functional.default,
    aten._batch_norm_no_update.default, aten._native_batch_norm_legit_no_training.default, behaviour=FORWARD,
)  # fmt: skip
def batch_norm_by_name(operator: _torch.Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[DTensor, ...]:
    """Those that say in their name whether they train."""
    input, weight, bias, *running, momentum, eps = _torch.arguments(operator, args, kwargs)
    training = "with_update" in operator._schema.name
    functional = operator is aten._batch_norm_with_update_functional.default
    result = _normalise("batch_norm", input, weight, bias, tuple(running), training, momentum, eps, not functional)
    reserve = () if operator is aten._native_batch_norm_legit_no_training.default else (_reserve(result),)
    return result.output, result.mean, result.rstd, *reserve, *(result.running if functional else ())


def _reserve(result: _Normalised) -> DTensor:
    """The scratch that some kernels hand to their backward: ours needs none."""
    layout = Layout.of(_torch.spec_of(result.mean))
    empty = layout.new((0,), (Replicate(),) * layout.mesh.ndim, torch.uint8)
    return _torch.wrap(_torch.local_of(result.mean).new_empty(0, dtype=torch.uint8), empty.spec)
