"""Max and average pooling with a fixed window, and their gradients."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf, prod
from typing import Any

import torch

from ... import _torch
from ...geometry import Interval, Pooling
from ...kernels.pooling import max_pool as local_max_pool
from ...sharding.call import Call
from ...sharding.layout import Layout
from ...sharding.plan_rule import plan_rule
from ...sharding.registry import Behaviour, made_of_others
from .._core.tiles import Tiling
from .flat_index import shifted
from .plan import PoolPlan, plan_pool, plan_pool_backward

aten = torch.ops.aten

made_of_others(
    *(getattr(aten, f"{kind}_pool{d}d").default for d in (1, 2, 3) for kind in ("max", "adaptive_avg")),
    aten.max_pool1d_with_indices.default,
    aten.avg_pool1d.default,
    aten.adaptive_max_pool1d.default,
)

STAYS = "batch, channels, space"
WHERE = "where windows overlap or shards do not align with them"
HALO = f"halo of the input, {WHERE}"
GRADIENTS = f"halo of the gradient, {WHERE}"
PARTS = "for each window that spans several ranks, one value per channel from each of them"


def name_of(operator: _torch.Operator) -> str:
    name: str = operator.name()
    return name.removeprefix("aten::")


def spatial_of(operator: _torch.Operator) -> int:
    """The number of spatial dimensions, 2 or 3: torch runs 1d pooling as 2d."""
    return 3 if "3d" in operator.name() else 2


@plan_rule(
    aten.max_pool2d_with_indices.default,
    aten.max_pool3d_with_indices.default,
    behaviour=Behaviour(STAYS, f"{HALO}; Partial is reduced first"),
)
def max_pool(operator: _torch.Operator, input: Layout, *window: Any) -> Call:
    pooling = _pooling(operator, input.shape, window[:-1], window[-1])
    plan = plan_pool(name_of(operator), pooling, False, input)
    return plan.call_with_indices(_MaxPool(operator, plan, pooling))


def _pooling(operator: _torch.Operator, shape: Sequence[int], window: Sequence[int | list[int]], ceil: bool) -> Pooling:
    """Make a `Pooling` for an input of this shape from kernel, stride, padding and, if there is one, dilation."""
    kernel, stride, padding, dilation = ([n] if isinstance(n, int) else n for n in (*window, 1)[:4])
    spatial = spatial_of(operator)
    return Pooling.of(spatial, kernel, stride, padding, dilation, ceil).within(shape[-spatial:])


class _MaxPool:
    """Computes values and flat indices from the block of the input that this rank's targets read."""

    def __init__(self, operator: _torch.Operator, plan: PoolPlan, pooling: Pooling):
        # The operator pads in front, so that a window in which no value wins returns its first index, as on one device;
        # behind, the block is filled with a value that never wins against an earlier one.
        self._starts, paddings, box = [0] * len(plan.spatial_dims), [*plan.padding], []
        for axis, spatial in enumerate(plan.spatial_dims):
            if spatial.sharded:
                self._starts[axis] = max(0, spatial.read.start)
                paddings[axis] = self._starts[axis] - spatial.read.start
                stop = max(min(spatial.read.stop, spatial.source_size), spatial.read.stop - paddings[axis])
                box.append(Interval(self._starts[axis], stop))
        self._geometry = pooling.kernel, pooling.stride, paddings, pooling.dilation, pooling.ceil
        self._operator, self._plan, self._box = operator, plan, tuple(box)
        self._shape = plan.computed.local_shape
        ndim = len(self._shape)
        computes = plan.tiling is not None and 0 not in self._shape
        self._block = plan.tiling.source_halos.block(self._box, ndim) if computes and plan.tiling is not None else None

    def __call__(self, x: torch.Tensor, *_: object) -> tuple[torch.Tensor, torch.Tensor]:
        lowest = -inf if x.is_floating_point() else torch.iinfo(x.dtype).min
        if self._block is not None:
            return self._pooled(self._block(x, lowest))
        assert self._plan.tiling is not None
        fetch = self._plan.tiling.fetch_sources(x)
        if 0 in self._shape:
            return fetch.tie(x.new_empty(self._shape)), x.new_empty(self._shape, dtype=torch.int64)
        values, indices = self._pooled(fetch.complete().read(self._box, fill=lowest))
        return fetch.tie(values), indices

    def _pooled(self, block: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        values, indices = local_max_pool(block, self._operator, *self._geometry)
        first = self._plan.first
        if values.shape != self._shape:
            for dim in range(first, len(self._shape)):
                values, indices = (t.narrow(dim, 0, self._shape[dim]) for t in (values, indices))
        return values, shifted(indices, block.shape[first:], self._starts, self._plan.source_sizes)


@plan_rule(
    aten.max_pool2d_with_indices_backward.default,
    aten.max_pool3d_with_indices_backward.default,
    behaviour=Behaviour(f"{STAYS}, Partial(sum)", GRADIENTS),
)
def max_pool_backward(
    operator: _torch.Operator, gradient: Layout, input: Layout, *rest: Any
) -> Call:  # only the shape of the input is used
    *window, ceil, indices = rest
    pooling = _pooling(operator, input.shape, window, ceil)
    plan = plan_pool_backward(name_of(operator), pooling, gradient, input, indices)
    by = [-spatial.read.start for spatial in plan.spatial_dims]
    geometry = pooling.kernel, pooling.stride, plan.padding, pooling.dilation, ceil

    def run(tiling: Tiling, gy: torch.Tensor, *others: Any) -> torch.Tensor:
        block = _source_block(plan, gy)
        if gy.numel():
            at = shifted(others[-1], plan.source_sizes, by, block.shape[plan.first :])
            block = operator(gy, block, *geometry, at)
        else:
            block.zero_()
        return tiling.sum_sources(block)

    return plan.call(run, None)


def _source_block(plan: PoolPlan, gy: torch.Tensor) -> torch.Tensor:
    """Allocate a block for the sources that this rank's targets read, with padding. Kernels only read its shape."""
    return gy.new_empty([*gy.shape[: plan.first], *(len(spatial.read) for spatial in plan.spatial_dims)])


@plan_rule(aten.avg_pool2d.default, aten.avg_pool3d.default, behaviour=Behaviour(f"{STAYS}, Partial(sum)", HALO))
def avg_pool(operator: _torch.Operator, input: Layout, *rest: Any) -> Call:
    *window, ceil, with_padding, divisor = rest
    pooling = _pooling(operator, input.shape, window, ceil)
    plan = plan_pool(name_of(operator), pooling, True, input)
    shape, geometry = plan.computed.local_shape, (pooling.kernel, pooling.stride, plan.padding, ceil)

    def run(tiling: Tiling, x: torch.Tensor, *_: Any) -> torch.Tensor:
        fetch = tiling.fetch_sources(x)
        if not prod(shape):
            return fetch.tie(x.new_empty(shape))
        if not tiling.dims:
            local: torch.Tensor = operator(x, *geometry, with_padding, divisor)
            return local
        block = fetch.complete().read(tiling.sources_read)
        y = operator(block, *geometry, True, divisor or prod(pooling.kernel))
        return fetch.tie(y if divisor else _reweighted(y, plan, pooling, with_padding))

    return plan.call(run)


@plan_rule(
    aten.avg_pool2d_backward.default, aten.avg_pool3d_backward.default,
    behaviour=Behaviour(f"{STAYS}, Partial(sum)", GRADIENTS),
)  # fmt: skip
def avg_pool_backward(operator: _torch.Operator, gradient: Layout, input: Layout, *rest: Any) -> Call:
    *window, ceil, with_padding, divisor = rest
    pooling = _pooling(operator, input.shape, window, ceil)
    plan = plan_pool_backward(name_of(operator), pooling, gradient, input)
    geometry = pooling.kernel, pooling.stride, plan.padding, ceil

    def run(tiling: Tiling, gy: torch.Tensor, *_: Any) -> torch.Tensor:
        block = _source_block(plan, gy)
        if not gy.numel():
            block.zero_()
        elif not tiling.dims:
            block = operator(gy, block, *geometry, with_padding, divisor)
        else:
            gy = gy if divisor else _reweighted(gy, plan, pooling, with_padding)
            block = operator(gy, block, *geometry, True, divisor or prod(pooling.kernel))
        return tiling.sum_sources(block)

    return plan.call(run, None)


def _reweighted(targets: torch.Tensor, plan: PoolPlan, pooling: Pooling, with_padding: bool) -> torch.Tensor:
    """Rescale targets that were divided by the kernel's size to a division by the number of indices averaged over."""
    for axis, spatial in enumerate(plan.spatial_dims):
        counts, kernel = pooling.counts(axis, spatial.source_size, spatial.targets, with_padding), pooling.kernel[axis]
        if any(count != kernel for count in counts):
            shape = [1] * targets.dim()
            shape[spatial.dim] = -1
            targets = targets * targets.new_tensor([kernel / count for count in counts]).view(shape)
    return targets
