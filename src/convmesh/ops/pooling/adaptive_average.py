"""Adaptive average pooling, and its gradient.

Along sharded dimensions each rank sums its part of every window by hand. Along other dimensions with few kinds of
windows it does so too, because the first dimension that is reduced takes most of the time. torch's operator does the
rest.
"""

from __future__ import annotations

from functools import reduce
from math import prod
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from ... import _torch
from ...geometry import AdaptivePooling, StridedWindows
from ...sharding.call import Call
from ...sharding.layout import Layout
from ...sharding.plan_rule import plan_rule
from ...sharding.registry import Behaviour, composite
from .._core.tiles import Tiling
from ..reductions.plan import wide
from .plan import PoolPlan, SpatialDim, plan_pool, plan_pool_backward
from .window import PARTS, STAYS, name_of, spatial_of

aten = torch.ops.aten

MOST_KINDS = 16  # of windows (by length and step) along a dimension that is still summed by hand

AVERAGE = Behaviour(f"{STAYS}, Partial(sum)", PARTS)


@plan_rule(aten._adaptive_avg_pool2d.default, aten._adaptive_avg_pool3d.default, behaviour=AVERAGE)
def adaptive_average(operator: _torch.Operator, input: Layout, sizes: tuple[int, ...]) -> Call:
    plan = plan_pool(name_of(operator), AdaptivePooling(sizes), True, input)
    manual = _manual_dims(plan)

    def run(tiling: Tiling, x: torch.Tensor, *_: Any) -> torch.Tensor:
        shape = plan.readers_shape(x)
        if not prod(shape) or not x.numel():
            return tiling.sum_targets(x.new_zeros(shape))
        means = reduce(_partial_means, manual, x)
        return tiling.sum_targets(operator(means, shape[plan.first :]).to(x.dtype))

    return plan.call(run)


@plan_rule(aten._adaptive_avg_pool2d_backward.default, aten._adaptive_avg_pool3d_backward.default, behaviour=AVERAGE)
def adaptive_average_backward(operator: _torch.Operator, gradient: Layout, input: Layout) -> Call:
    pooling = AdaptivePooling(gradient.shape[-spatial_of(operator) :])
    plan = plan_pool_backward(name_of(operator), pooling, gradient, input)
    manual = _manual_dims(plan)
    others = [spatial for spatial in plan.spatial_dims if spatial not in manual]

    def run(tiling: Tiling, gy: torch.Tensor, _: Any) -> torch.Tensor:
        fetch = tiling.fetch_targets(gy)
        gx = fetch.complete().read(tiling.readers)
        own = [*gy.shape[: plan.first], *(len(spatial.sources) for spatial in plan.spatial_dims)]
        if not prod(own) or not gx.numel():
            return fetch.tie(gy.new_zeros(own))
        if others:
            shape = own.copy()
            for spatial in manual:
                shape[spatial.dim] = len(spatial.readers)
            gx = operator(gx, gx.new_empty(shape))
        return fetch.tie(reduce(_source_gradients, reversed(manual), gx))

    return plan.call(run, None)


@composite("adaptive_avg_pool2d", AVERAGE)
def adaptive_avg_pool2d(input: torch.Tensor, output_size: list[int]) -> torch.Tensor:
    return _pooled(aten.adaptive_avg_pool2d.default, input, output_size)


@composite("adaptive_avg_pool3d", AVERAGE)
def adaptive_avg_pool3d(input: torch.Tensor, output_size: list[int]) -> torch.Tensor:
    return _pooled(aten.adaptive_avg_pool3d.default, input, output_size)


def _pooled(operator: _torch.Operator, input: torch.Tensor, output_size: list[int]) -> torch.Tensor:
    """Take the mean if there is one window: torch would change strides of channels_last tensors, as no DTensor can."""
    if isinstance(input, DTensor) and len(output_size) < input.dim() and all(size == 1 for size in output_size):
        return input.mean(tuple(range(-len(output_size), 0)), keepdim=True)
    result: torch.Tensor = _torch.composite(operator, (input, output_size), {})
    return result


def _manual_dims(plan: PoolPlan) -> list[SpatialDim]:
    """Return the dimensions along which windows are summed by hand; none if nothing is sharded."""
    if not any(spatial.sharded for spatial in plan.spatial_dims):
        return []
    return [spatial for spatial in plan.spatial_dims if spatial.sharded or len(spatial.strided_windows) <= MOST_KINDS]


def _partial_means(x: torch.Tensor, spatial: SpatialDim) -> torch.Tensor:
    """Return what this rank's sources contribute to the mean of each window that has any of them."""
    shape = list(x.shape)
    shape[spatial.dim] = len(spatial.readers)
    means = x.new_zeros(shape, dtype=wide(x.dtype))
    for windows in spatial.strided_windows:
        total = _windows(x, spatial.dim, windows).sum(spatial.dim + 1, dtype=means.dtype)
        _targets(means, spatial.dim, windows).copy_(total.div_(windows.full_length))
    return means


def _source_gradients(gy: torch.Tensor, spatial: SpatialDim) -> torch.Tensor:
    """The adjoint of `_partial_means`: each source gets its share of the gradients of the windows that it is in."""
    shape = list(gy.shape)
    shape[spatial.dim] = len(spatial.sources)
    gx = gy.new_zeros(shape)
    for windows in spatial.strided_windows:
        share = _targets(gy, spatial.dim, windows) / windows.full_length
        _windows(gx, spatial.dim, windows).add_(share.unsqueeze(spatial.dim + 1))
    return gx


def _windows(sources: torch.Tensor, dim: int, windows: StridedWindows) -> torch.Tensor:
    """Return a view of the sources as windows: `[... sources ...] -> [... windows, sources of each ...]`."""
    rows = sources.narrow(dim, windows.start, windows.count * windows.step)
    view: torch.Tensor = rows.unflatten(dim, (windows.count, windows.step))
    return view.narrow(dim + 1, 0, windows.length)


def _targets(targets: torch.Tensor, dim: int, windows: StridedWindows) -> torch.Tensor:
    """Return a view of the targets of these windows."""
    stop = windows.target + windows.target_step * (windows.count - 1) + 1
    return targets[(*[slice(None)] * dim, slice(windows.target, stop, windows.target_step))]
