"""Adaptive average pooling, and its gradient.

Along sharded dimensions each rank sums what it has of every window. Along others with few kinds of windows it does so
too, because the first dimension that is reduced is the one that takes time. torch's own operator does the rest.
"""

from __future__ import annotations

from math import prod
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from ... import _torch
from ...geometry import AdaptivePooling, StridedWindows
from ...sharding.redistribute import check_placed, move
from ...sharding.registry import Behaviour, composite, rule
from ..reductions.plan import wide
from .plan import PoolPlan, Side, plan_pool, plan_pool_backward
from .window import PARTS, STAYS, name_of, spatial_of

aten = torch.ops.aten

FEW = 16  # kinds of windows

AVERAGE = Behaviour(f"{STAYS}, Partial(sum)", PARTS)


@rule(aten._adaptive_avg_pool2d.default, aten._adaptive_avg_pool3d.default, behaviour=AVERAGE)
def adaptive_average(operator: _torch.Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> DTensor:
    input, sizes = _torch.arguments(operator, args, kwargs)
    specs = check_placed(name_of(operator), (("input", input),))
    plan = plan_pool(name_of(operator), AdaptivePooling(tuple(map(int, sizes))), True, *specs)
    if plan.tiling is None:
        return plan.outside(input)
    x = move(input, plan.operands[0])
    shape = plan.readers_shape(x)
    if not prod(shape) or not x.numel():
        parts = x.new_zeros(shape)
    else:
        parts = x
        for side in _by_hand(plan):
            parts = _share_of_means(parts, side)
        parts = operator(parts, shape[plan.first :]).to(x.dtype)
    return plan.finish(plan.tiling.sum_targets(parts))


@rule(aten._adaptive_avg_pool2d_backward.default, aten._adaptive_avg_pool3d_backward.default, behaviour=AVERAGE)
def adaptive_average_backward(operator: _torch.Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> DTensor:
    gradient, input = _torch.arguments(operator, args, kwargs)
    specs = check_placed(name_of(operator), (("grad_output", gradient), ("input", input)))
    pooling = AdaptivePooling(tuple(gradient.shape[-spatial_of(operator) :]))
    plan = plan_pool_backward(name_of(operator), pooling, *specs)
    if plan.tiling is None:
        return plan.outside(gradient)
    gy = move(gradient, plan.operands[0])
    fetch = plan.tiling.fetch_targets(gy)
    gx = fetch.complete().read(plan.tiling.readers)
    own = [*gy.shape[: plan.first], *(len(side.sources) for side in plan.sides)]
    if not prod(own) or not gx.numel():
        return plan.finish(fetch.tie(gy.new_zeros(own)))
    by_hand = _by_hand(plan)
    if len(by_hand) < len(plan.sides):
        shape = own.copy()
        for side in by_hand:
            shape[side.dim] = len(side.readers)
        gx = operator(gx, gx.new_empty(shape))
    for side in reversed(by_hand):
        gx = _share_of_gradients(gx, side)
    return plan.finish(fetch.tie(gx))


@composite("adaptive_avg_pool2d")
def adaptive_avg_pool2d(input: torch.Tensor, output_size: list[int]) -> torch.Tensor:
    return _pooled(aten.adaptive_avg_pool2d.default, input, output_size)


@composite("adaptive_avg_pool3d")
def adaptive_avg_pool3d(input: torch.Tensor, output_size: list[int]) -> torch.Tensor:
    return _pooled(aten.adaptive_avg_pool3d.default, input, output_size)


@rule(aten.adaptive_avg_pool2d.default, aten.adaptive_avg_pool3d.default, behaviour=AVERAGE)
def undecomposed(operator: _torch.Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    """In inference mode they reach DTensor as they are."""
    return _pooled(operator, *_torch.arguments(operator, args, kwargs))


def _pooled(operator: _torch.Operator, input: torch.Tensor, output_size: list[int]) -> torch.Tensor:
    """One window is a mean. Of channels_last tensors torch corrects its strides then, which no DTensor can do."""
    if isinstance(input, DTensor) and len(output_size) < input.dim() and all(size == 1 for size in output_size):
        return input.mean(tuple(range(-len(output_size), 0)), keepdim=True)
    result: torch.Tensor = _torch.composite(operator, (input, output_size), {})
    return result


def _by_hand(plan: PoolPlan) -> list[Side]:
    if not any(side.sharded for side in plan.sides):
        return []
    return [side for side in plan.sides if side.sharded or len(side.strided_windows) <= FEW]


def _share_of_means(x: torch.Tensor, side: Side) -> torch.Tensor:
    """What this rank's sources add to the mean over each window that has any of them."""
    shape = list(x.shape)
    shape[side.dim] = len(side.readers)
    means = x.new_zeros(shape, dtype=wide(x.dtype))
    for windows in side.strided_windows:
        total = _windows(x, side.dim, windows).sum(side.dim + 1, dtype=means.dtype)
        _targets(means, side.dim, windows).copy_(total.div_(windows.full_length))
    return means


def _share_of_gradients(gy: torch.Tensor, side: Side) -> torch.Tensor:
    """The adjoint: a source gets its share of every window that it is in."""
    shape = list(gy.shape)
    shape[side.dim] = len(side.sources)
    gx = gy.new_zeros(shape)
    for windows in side.strided_windows:
        share = _targets(gy, side.dim, windows) / windows.full_length
        _windows(gx, side.dim, windows).add_(share.unsqueeze(side.dim + 1))
    return gx


def _windows(sources: torch.Tensor, dim: int, windows: StridedWindows) -> torch.Tensor:
    """[... sources ...] -> [... windows, sources of each ...], a view."""
    rows = sources.narrow(dim, windows.start, windows.count * windows.step)
    view: torch.Tensor = rows.unflatten(dim, (windows.count, windows.step))
    return view.narrow(dim + 1, 0, windows.length)


def _targets(targets: torch.Tensor, dim: int, windows: StridedWindows) -> torch.Tensor:
    stop = windows.target + windows.target_step * (windows.count - 1) + 1
    return targets[(*[slice(None)] * dim, slice(windows.target, stop, windows.target_step))]
