"""Adaptive max pooling, and its gradient."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import torch

from ... import _torch
from ...geometry import AdaptivePooling
from ...sharding.call import Call
from ...sharding.layout import Layout
from ...sharding.plan_rule import plan_rule
from ...sharding.registry import Behaviour
from .._core.tiles import Tiling
from .flat_index import coordinates, flatten
from .plan import SpatialDim, plan_pool, plan_pool_backward
from .window import PARTS, STAYS, name_of, spatial_of

aten = torch.ops.aten

MAXIMUM = {2: aten.max_pool2d_with_indices.default, 3: aten.max_pool3d_with_indices.default}


@plan_rule(
    aten.adaptive_max_pool2d.default, aten.adaptive_max_pool3d.default,
    behaviour=Behaviour(STAYS, f"{PARTS}, and its index; Partial is reduced first"),
)  # fmt: skip
def adaptive_max(operator: _torch.Operator, input: Layout, sizes: tuple[int, ...]) -> Call:
    pooling = AdaptivePooling(sizes * (spatial_of(operator) // len(sizes)))
    plan = plan_pool(name_of(operator), pooling, False, input)

    def run(x: torch.Tensor, _: Any) -> list[torch.Tensor]:
        assert plan.tiling is not None
        shape = plan.readers_shape(x)
        values, indices = x.new_empty(shape), x.new_empty(shape, dtype=torch.int64)
        if values.numel():
            width = [spatial.padded_windows.width for spatial in plan.spatial_dims]
            padded = _padded_windows(x, plan.spatial_dims)
            padded = padded if plan.first > 1 else padded.contiguous()  # the kernels merge channels and volume
            values, indices = MAXIMUM[len(width)](padded, width, width)
            along = coordinates(indices, padded.shape[plan.first :])
            indices = flatten([*map(_source_of, along, plan.spatial_dims)], plan.source_sizes)
        return plan.tiling.combine_targets([values, indices], (0, -1), _update_max)

    return plan.call_with_indices(run)


@plan_rule(
    aten.adaptive_max_pool2d_backward.default, aten.adaptive_max_pool3d_backward.default,
    behaviour=Behaviour(f"{STAYS}, Partial(sum)", f"{PARTS}, and its index"),
)  # fmt: skip
def adaptive_max_backward(operator: _torch.Operator, gradient: Layout, input: Layout, indices: Layout) -> Call:
    pooling = AdaptivePooling(gradient.shape[-spatial_of(operator) :])
    plan = plan_pool_backward(name_of(operator), pooling, gradient, input, indices)
    own = [len(spatial.sources) for spatial in plan.spatial_dims]

    def run(tiling: Tiling, gy: torch.Tensor, _: Any, at: torch.Tensor) -> torch.Tensor:
        # The compiler may move what does not depend on the gradient into the forward pass, on some ranks only: so the
        # indices are made to depend on it.
        fetches = [tiling.fetch_targets(gy), tiling.fetch_targets(_torch.tie(at, gy))]
        gy, at = (fetch.complete().read(tiling.readers) for fetch in fetches)
        along = coordinates(at, plan.source_sizes)
        for spatial, index in zip(plan.spatial_dims, along, strict=True):
            if spatial.sharded:  # where the maximum is on another rank, that rank adds it
                mine = (index >= spatial.sources.start) & (index < spatial.sources.stop)
                gy = torch.where(mine, gy, 0)
        gx = gy.new_zeros([*gy.shape[: plan.first], prod(own)])
        if gx.numel() and gy.numel():
            local = [
                (index - spatial.sources.start).clamp(0, len(spatial.sources) - 1)
                for spatial, index in zip(plan.spatial_dims, along, strict=True)
            ]
            gx.scatter_add_(-1, flatten(local, own).flatten(plan.first), gy.flatten(plan.first))
        for fetch in fetches:
            gx = fetch.tie(gx)
        return gx.view(*gy.shape[: plan.first], *own)

    return plan.call(run, None)


def _padded_windows(x: torch.Tensor, spatial_dims: Sequence[SpatialDim]) -> torch.Tensor:
    """Concatenate all windows, padded to one length."""
    for spatial in spatial_dims:
        if not spatial.padded_windows.trivial or len(spatial.padded_windows.positions) != x.shape[spatial.dim]:
            x = x.index_select(spatial.dim, spatial.positions.on(x.device))
    return x


def _source_of(index: torch.Tensor, spatial: SpatialDim) -> torch.Tensor:
    """Return the source indices for these indices into the padded windows."""
    if spatial.padded_windows.trivial:
        return index + spatial.sources.start
    return spatial.positions.on(index.device)[index] + spatial.sources.start


def _update_max(best: torch.Tensor, at: torch.Tensor, value: torch.Tensor, index: torch.Tensor) -> None:
    """Update `best` and `at` in place. As on one device, the first of equal values wins, but the last of NaNs."""
    better = (at < 0) | (value > best) | ((value == best) & (index < at))
    better |= value.isnan() & (~best.isnan() | (index > at))
    best.copy_(torch.where(better, value, best))
    at.copy_(torch.where(better, index, at))
