"""Negative log likelihood over any number of spatial dimensions, with batch, space or classes sharded.

A rank picks the classes that it has. The losses, the weights and the number of targets that are no class at all are
added up together: a mean weighs every element right, whatever the shards weigh.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement, Replicate, Shard

from ... import _torch
from ...comm import all_reduce
from ...geometry import Interval
from ...kernels import synchronous
from ...sharding.errors import refuse
from ...sharding.layout import Layout, dense_stride
from ...sharding.plan_cache import planned
from ...sharding.redistribute import check_placed, move
from ...sharding.registry import Behaviour, rule
from ..normalization.common import new
from ..reductions.plan import absent, cutting, settled, wide, wrap_dense
from .elementwise import MEAN, NONE, SUM

aten = torch.ops.aten

FORWARD = Behaviour(
    "batch, classes, space",
    "all-reduce of 3 numbers; of the picked values where classes are cut, unreduced (on CPUs one, for bad targets)",
)
BACKWARD = Behaviour("batch, classes, space", "nothing")


@dataclass(frozen=True)
class NllPlan:
    input: Layout
    target: Layout
    weight: Layout | None
    total: Layout
    picked: Layout  # one loss for each target
    class_dim: int
    classes: Interval  # this rank's
    count: int  # of all classes
    class_mesh_dims: tuple[int, ...]
    mesh_dims: tuple[int, ...]
    counts_weights: bool  # where classes are cut, several ranks see a target, and one counts its weight
    present: bool


@planned
def plan_nll(input_spec: _torch.Spec, target_spec: _torch.Spec, weight_spec: _torch.Spec | None) -> NllPlan:
    input, target = Layout.of(input_spec), Layout.of(target_spec)
    weight = None if weight_spec is None else Layout.of(weight_spec)
    named = (("input", input), ("target", target), ("weight", weight))
    dim = 0 if len(input.shape) == 1 else 1
    if not input.shape or target.shape != (*input.shape[:dim], *input.shape[dim + 1 :]):
        raise refuse("nll_loss", "the target needs the input's shape without its classes", named,
                     "give input (N, C, *space) and target (N, *space)")  # fmt: skip
    if weight is not None and weight.shape != (input.shape[dim],):
        raise refuse("nll_loss", f"the weight needs one number for each of the {input.shape[dim]} classes", named,
                     f"give it shape ({input.shape[dim]},)")  # fmt: skip
    if target.dtype not in (torch.int64, torch.uint8):
        raise refuse("nll_loss", f"a target of dtype {target.dtype} names no classes", named, "cast it to torch.int64")
    placed = settled(input)
    if all(isinstance(p, Replicate) for p in placed.placements):  # then as the target is: cutting costs nothing
        placed = input.placed(tuple(_with_classes(p, dim) for p in settled(target).placements))
    beside = tuple(_without_classes(p, dim) for p in placed.placements)
    here = input.mesh.get_coordinate()
    class_mesh_dims = cutting(placed, (dim,))
    everywhere = (Replicate(),) * input.mesh.ndim
    picked = Layout(input.mesh, beside, target.shape, dense_stride(target.shape, torch.contiguous_format), input.dtype)
    return NllPlan(
        placed, target.placed(beside), weight and weight.placed(everywhere), new(input, (), everywhere, input.dtype),
        picked, dim, placed.own(dim) if here is not None else Interval(0, 0), input.shape[dim], class_mesh_dims,
        cutting(placed, range(len(input.shape))), here is not None and all(here[m] == 0 for m in class_mesh_dims),
        here is not None,
    )  # fmt: skip


def _without_classes(placement: Placement, dim: int) -> Placement:
    if not isinstance(placement, Shard):
        return placement
    return Replicate() if placement.dim == dim else Shard(placement.dim - (placement.dim > dim))


def _with_classes(placement: Placement, dim: int) -> Placement:
    return Shard(placement.dim + (placement.dim >= dim)) if isinstance(placement, Shard) else placement


@dataclass(frozen=True)
class _Targets:
    """What this rank's targets ask for."""

    place: torch.Tensor  # which of the rank's classes, where it has the class
    has: torch.Tensor
    weight: torch.Tensor  # of each target, 0 where it is ignored
    wrong: torch.Tensor  # neither ignored nor a class


def _targets(plan: NllPlan, target: Any, weight: Any, ignored: int, dtype: torch.dtype) -> _Targets:
    t = move(target, plan.target).long()
    w = move(weight, plan.weight)
    counted = t != ignored
    wrong = counted & ((t < 0) | (t >= plan.count))
    counted = counted & ~wrong
    by_class = torch.ones((), dtype=dtype, device=t.device) if w is None else w[t.where(counted, 0)].to(dtype)
    has = counted & (t >= plan.classes.start) & (t < plan.classes.stop)
    return _Targets((t - plan.classes.start).where(has, 0), has, torch.where(counted, by_class, 0), wrong)


def _check(input: Any, target: Any, weight: Any, *more: Any) -> NllPlan:
    named = zip(("input", "target", "weight", "grad_output"), (input, target, weight, *more), strict=False)
    return plan_nll(*check_placed("nll_loss", tuple(named))[:3])


@rule(aten.nll_loss_forward.default, aten.nll_loss2d_forward.default, behaviour=FORWARD)
def nll_loss(operator: _torch.Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[DTensor, DTensor]:
    input, target, weight, reduction, ignored = _torch.arguments(operator, args, kwargs)
    plan = _check(input, target, weight)
    result = plan.picked if reduction == NONE else plan.total
    if not plan.present:
        return absent(input, result), absent(input, plan.total)
    x = move(input, plan.input)
    dtype = wide(x.dtype)
    if reduction != NONE and _by_kernel(plan, operator, x):
        if not plan.mesh_dims:  # all ranks have all of it, and raise alike
            loss, weights = operator(x, move(target, plan.target), move(weight, plan.weight), reduction, ignored)
            return wrap_dense(loss, plan.total), wrap_dense(weights, plan.total)
        sums = _sums_by_kernel(plan, operator, x, move(target, plan.target), move(weight, plan.weight), ignored)
        if sums is not None:
            return _put_together(plan, sums, reduction)
    targets = _targets(plan, target, weight, int(ignored), dtype)
    each = torch.where(targets.has, -_pick(plan, x, targets).to(dtype) * targets.weight, 0)
    mesh = plan.input.mesh
    if reduction == NONE:
        _tell_of_wrong(plan, targets.wrong)
        each = all_reduce(each, mesh, plan.class_mesh_dims)
        return wrap_dense(each.masked_fill(targets.wrong, torch.nan), plan.picked), wrap_dense(
            each.new_zeros(()), plan.total
        )
    weights, wrong = targets.weight.sum(), targets.wrong.sum().to(dtype)
    if not plan.counts_weights:
        weights, wrong = torch.zeros_like(weights), torch.zeros_like(wrong)
    return _put_together(plan, [each.sum(), weights, wrong], reduction)


def _tell_of_wrong(plan: NllPlan, wrong: torch.Tensor) -> None:
    """Where nothing else is added up, ranks tell each other how many of their targets are no class."""
    if synchronous(wrong):
        mesh_dims = [m for m in plan.mesh_dims if m not in plan.class_mesh_dims]
        _raise_if(all_reduce(wrong.sum(), plan.input.mesh, mesh_dims), plan)


def _put_together(plan: NllPlan, sums: list[torch.Tensor], reduction: int) -> tuple[DTensor, DTensor]:
    """From this rank's losses, weights and number of wrong targets to those of all."""
    loss, weights, wrong = all_reduce(torch.stack(sums), plan.input.mesh, plan.mesh_dims)
    _raise_if(wrong, plan)
    loss = (loss / weights if reduction == MEAN else loss).masked_fill(wrong > 0, torch.nan)
    return wrap_dense(loss, plan.total), wrap_dense(weights, plan.total)


def _by_kernel(plan: NllPlan, operator: _torch.Operator, x: torch.Tensor) -> bool:
    """Whether torch's own kernel does for a rank's part: one call instead of ten, of which only a CPU says what is
    wrong, and none knows of classes on other ranks, of more than two dimensions of space, or of wide sums."""
    spatial = operator in (aten.nll_loss2d_forward.default, aten.nll_loss2d_backward.default)
    fits = x.dim() == 4 if spatial else x.dim() == 2
    typed = plan.target.dtype == torch.int64 and wide(x.dtype) == x.dtype
    return fits and typed and synchronous(x) and not plan.class_mesh_dims and bool(x.numel())


def _sums_by_kernel(
    plan: NllPlan, operator: _torch.Operator, x: torch.Tensor, target: torch.Tensor, weight: Any, ignored: int
) -> list[torch.Tensor] | None:
    """None where a target is wrong: then all ranks have to be told before one of them raises."""
    try:
        loss, weights = operator(x, target, weight, SUM, ignored)
    except IndexError:
        return None
    return [loss, weights, torch.zeros_like(loss)]


def _pick(plan: NllPlan, x: torch.Tensor, targets: _Targets) -> torch.Tensor:
    if not len(plan.classes):
        return x.new_zeros(targets.place.shape)
    return x.gather(plan.class_dim, targets.place.unsqueeze(plan.class_dim)).squeeze(plan.class_dim)


def _raise_if(wrong: torch.Tensor, plan: NllPlan) -> None:
    """All ranks have the same number, so they raise alike. A device that runs ahead is not waited for: it has NaN."""
    if synchronous(wrong) and wrong.item():
        raise IndexError(f"nll_loss: {int(wrong.item())} targets are neither ignored nor one of {plan.count} classes")


@rule(aten.nll_loss_backward.default, aten.nll_loss2d_backward.default, behaviour=BACKWARD)
def nll_loss_backward(operator: _torch.Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> DTensor:
    gradient, input, target, weight, reduction, ignored, total = _torch.arguments(operator, args, kwargs)
    plan = _check(input, target, weight, gradient)
    if not plan.present:
        return absent(input, plan.input.dense)
    gy = move(gradient, plan.picked if reduction == NONE else plan.total)
    x = move(input, plan.input)
    if reduction != NONE and _by_kernel(plan, operator, x):
        numbers = move(target, plan.target), move(weight, plan.weight), reduction, ignored, move(total, plan.total)
        # Of the input only the shape is used, but the kernel wants to write a result without gaps like it.
        return wrap_dense(operator(gy, x.contiguous(), *numbers), plan.input.dense)
    targets = _targets(plan, target, weight, int(ignored), wide(input.dtype))
    if reduction == MEAN:
        gy = gy / move(total, plan.total)
    values = torch.where(targets.has, -targets.weight * gy, 0).to(input.dtype)
    gx = torch.zeros_like(x, memory_format=torch.preserve_format)
    if len(plan.classes):
        gx.scatter_(plan.class_dim, targets.place.unsqueeze(plan.class_dim), values.unsqueeze(plan.class_dim))
    return wrap_dense(gx, plan.input.dense)
