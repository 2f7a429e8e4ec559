"""Max and average pooling with a fixed window, and their gradients."""

from __future__ import annotations

from math import inf, prod
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from ... import _torch
from ...geometry import Interval, Pooling
from ...kernels.pooling import max_pool as local_max_pool
from ...sharding.redistribute import check_placed, move
from ...sharding.registry import Behaviour, made_of_others, rule
from .flat_index import shifted
from .window_plan import LocalPooling, plan_pool, plan_pool_backward

aten = torch.ops.aten

made_of_others(
    *(getattr(aten, f"{kind}_pool{d}d").default for d in (1, 2, 3) for kind in ("max", "adaptive_avg")),
    aten.max_pool1d_with_indices.default,
    aten.avg_pool1d.default,
    aten.adaptive_max_pool1d.default,
)

STAYS = "batch, channels, space"
HALO = "halo of the input, where windows overlap or shards do not align with them"
GRADIENTS = "the gradient's halo, likewise"


def name_of(operator: _torch.Operator) -> str:
    name: str = operator.name()
    return name.removeprefix("aten::")


def spatial_of(operator: _torch.Operator) -> int:
    """2 or 3: one dimension comes as two."""
    return 3 if "3d" in operator.name() else 2


@rule(
    aten.max_pool2d_with_indices.default,
    aten.max_pool3d_with_indices.default,
    behaviour=Behaviour(STAYS, f"{HALO}; Partial is reduced first"),
)
def max_pool(operator: _torch.Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[DTensor, DTensor]:
    input, kernel, stride, padding, dilation, ceil = _torch.arguments(operator, args, kwargs)
    check_placed(name_of(operator), (("input", input),))
    pooling = Pooling.of(spatial_of(operator), kernel, stride, _each(padding), _each(dilation), ceil)
    plan = plan_pool(name_of(operator), _torch.spec_of(input), pooling, False)
    layouts = plan.layouts
    if plan.local is None:
        return layouts.outside(input), layouts.of_indices.outside(input)
    values, indices = _max_pool(operator, plan.local, move(input, layouts.operands[0]), layouts.wanted.local_shape)
    return layouts.finish(values), layouts.of_indices.finish(indices)


def _each(value: int | list[int]) -> list[int]:
    return [value] if isinstance(value, int) else value


def _max_pool(
    operator: _torch.Operator, local: LocalPooling, x: torch.Tensor, shape: tuple[int, ...]
) -> tuple[torch.Tensor, torch.Tensor]:
    fetch = local.tiling.fetch_sources(x)
    if not prod(shape):
        return fetch.tie(x.new_empty(shape)), x.new_empty(shape, dtype=torch.int64)
    # The operator pads in front, so that a window without any number points at its first index as it does on one
    # device; behind, padding is a fill that no window prefers to what comes before it.
    starts, paddings, box = [0] * len(local.kernel), local.padding, []
    for axis, window in enumerate(local.pooling.windows):
        if local.is_sharded(axis):
            read, size = local.read(axis), local.source_sizes[axis]
            starts[axis] = max(0, read.start)
            paddings[axis] = starts[axis] - read.start
            assert paddings[axis] <= window.padding
            box.append(Interval(starts[axis], max(min(read.stop, size), read.stop - paddings[axis])))
    lowest = -inf if x.is_floating_point() else torch.iinfo(x.dtype).min
    block = fetch.complete().read(tuple(box), fill=lowest)
    geometry = (local.kernel, local.stride, paddings, local.dilation, local.pooling.ceil)
    values, indices = local_max_pool(block, operator, *geometry)
    for axis in range(len(local.kernel)):
        count = shape[local.first + axis]
        values, indices = (t.narrow(local.first + axis, 0, count) for t in (values, indices))
    return fetch.tie(values), shifted(indices, block.shape[local.first :], starts, local.source_sizes)


@rule(
    aten.max_pool2d_with_indices_backward.default,
    aten.max_pool3d_with_indices_backward.default,
    behaviour=Behaviour(f"{STAYS}, Partial(sum)", GRADIENTS),
)
def max_pool_backward(operator: _torch.Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> DTensor:
    gradient, input, kernel, stride, padding, dilation, ceil, indices = _torch.arguments(operator, args, kwargs)
    check_placed(name_of(operator), (("grad_output", gradient), ("input", input), ("indices", indices)))
    pooling = Pooling.of(spatial_of(operator), kernel, stride, _each(padding), _each(dilation), ceil)
    specs = (_torch.spec_of(tensor) for tensor in (gradient, input, indices))
    plan = plan_pool_backward(name_of(operator), *specs, pooling)
    if plan.local is None:
        return plan.layouts.outside(gradient)
    local, (gy, at) = plan.local, map(move, (gradient, indices), plan.layouts.operands)
    block, shape = _source_block(local, gy)
    if gy.numel():
        by = [-local.read(axis).start for axis in range(len(local.kernel))]
        at = shifted(at, local.source_sizes, by, shape[local.first :])
        rest = (local.stride, local.padding, local.dilation, pooling.ceil)
        block = operator(gy, block, local.kernel, *rest, at)
    else:
        block.zero_()
    return plan.layouts.finish(local.tiling.sum_sources(block))


def _source_block(local: LocalPooling, gy: torch.Tensor) -> tuple[torch.Tensor, list[int]]:
    """Room for the sources, padding included, that this rank's targets read. The operators look at its shape only."""
    shape = [*gy.shape[: local.first], *(len(local.read(axis)) for axis in range(len(local.kernel)))]
    return gy.new_empty(shape), shape


@rule(
    aten.avg_pool2d.default,
    aten.avg_pool3d.default,
    behaviour=Behaviour(f"{STAYS}, Partial(sum)", HALO),
)
def avg_pool(operator: _torch.Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> DTensor:
    input, kernel, stride, padding, ceil, with_padding, divisor = _torch.arguments(operator, args, kwargs)
    check_placed(name_of(operator), (("input", input),))
    pooling = Pooling.of(spatial_of(operator), kernel, stride, _each(padding), [1], ceil)
    plan = plan_pool(name_of(operator), _torch.spec_of(input), pooling, True)
    if plan.local is None:
        return plan.layouts.outside(input)
    local, x = plan.local, move(input, plan.layouts.operands[0])
    fetch = local.tiling.fetch_sources(x)
    shape = plan.layouts.computed.local_shape
    if not prod(shape):
        return plan.layouts.finish(fetch.tie(x.new_empty(shape)))
    if not local.tiling.dims:
        y = operator(x, local.kernel, local.stride, local.padding, ceil, with_padding, divisor)
        return plan.layouts.finish(y)
    block = fetch.complete().read(local.tiling.sources_read)
    y = operator(block, local.kernel, local.stride, local.padding, ceil, True, divisor or prod(local.kernel))
    return plan.layouts.finish(fetch.tie(y if divisor else _reweighted(y, local, with_padding)))


@rule(
    aten.avg_pool2d_backward.default,
    aten.avg_pool3d_backward.default,
    behaviour=Behaviour(f"{STAYS}, Partial(sum)", GRADIENTS),
)
def avg_pool_backward(operator: _torch.Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> DTensor:
    gradient, input, kernel, stride, padding, ceil, with_padding, divisor = _torch.arguments(operator, args, kwargs)
    check_placed(name_of(operator), (("grad_output", gradient), ("input", input)))
    pooling = Pooling.of(spatial_of(operator), kernel, stride, _each(padding), [1], ceil)
    specs = (_torch.spec_of(gradient), _torch.spec_of(input), None)
    plan = plan_pool_backward(name_of(operator), *specs, pooling)
    if plan.local is None:
        return plan.layouts.outside(gradient)
    local, gy = plan.local, move(gradient, plan.layouts.operands[0])
    block, _ = _source_block(local, gy)
    if not gy.numel():
        return plan.layouts.finish(local.tiling.sum_sources(block.zero_()))
    if not local.tiling.dims:
        gx = operator(gy, block, local.kernel, local.stride, local.padding, ceil, with_padding, divisor)
        return plan.layouts.finish(gx)
    gy = gy if divisor else _reweighted(gy, local, with_padding)
    rest = (local.stride, local.padding, ceil, True, divisor or prod(local.kernel))
    return plan.layouts.finish(local.tiling.sum_sources(operator(gy, block, local.kernel, *rest)))


def _reweighted(targets: torch.Tensor, local: LocalPooling, with_padding: bool) -> torch.Tensor:
    """Targets that were divided by the kernel's size, as if by the number of indices that each averages over."""
    for axis, window in enumerate(local.pooling.windows):
        counts = local.pooling.counts(axis, local.source_sizes[axis], local.targets(axis), with_padding)
        if any(count != window.kernel for count in counts):
            shape = [1] * targets.dim()
            shape[local.first + axis] = -1
            targets = targets * targets.new_tensor([window.kernel / count for count in counts]).view(shape)
    return targets
