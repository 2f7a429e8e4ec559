"""Adaptive max pooling, and its gradient."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from ... import _torch
from ...sharding.redistribute import check_placed, move
from ...sharding.registry import Behaviour, rule
from .adaptive_plan import PARTS, Side, plan_adaptive, plan_adaptive_backward
from .flat_index import coordinates, flatten
from .window import STAYS, name_of, spatial_of

aten = torch.ops.aten

MAXIMUM = {2: aten.max_pool2d_with_indices.default, 3: aten.max_pool3d_with_indices.default}


@rule(
    aten.adaptive_max_pool2d.default,
    aten.adaptive_max_pool3d.default,
    behaviour=Behaviour(STAYS, f"{PARTS}, and its index; Partial is reduced first"),
)
def adaptive_max(operator: _torch.Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[DTensor, DTensor]:
    input, sizes = _torch.arguments(operator, args, kwargs)
    check_placed(name_of(operator), (("input", input),))
    sizes = tuple(map(int, sizes)) * (spatial_of(operator) // len(sizes))
    plan = plan_adaptive(name_of(operator), _torch.spec_of(input), sizes, False)
    layouts = plan.layouts
    if layouts.tiling is None:
        return layouts.outside(input), layouts.of_indices.outside(input)
    x = move(input, layouts.operands[0])
    shape = plan.readers_shape(x)
    values, indices = x.new_empty(shape), x.new_empty(shape, dtype=torch.int64)
    if values.numel():
        width = [side.padded_windows.width for side in plan.sides]
        padded = _padded_windows(x, plan.sides)
        padded = padded if plan.first > 1 else padded.contiguous()  # its kernels take channels and volume for an image
        values, indices = MAXIMUM[len(width)](padded, width, width)
        along = coordinates(indices, padded.shape[plan.first :])
        along = [_source_of(index, side) for index, side in zip(along, plan.sides, strict=True)]
        indices = flatten(along, [side.windows.source_size for side in plan.sides])
    values, indices = layouts.tiling.combine_targets([values, indices], (0, -1), _keep_better)
    return layouts.finish(values), layouts.of_indices.finish(indices)


@rule(
    aten.adaptive_max_pool2d_backward.default,
    aten.adaptive_max_pool3d_backward.default,
    behaviour=Behaviour(f"{STAYS}, Partial(sum)", f"{PARTS}, and its index"),
)
def adaptive_max_backward(operator: _torch.Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> DTensor:
    gradient, input, indices = _torch.arguments(operator, args, kwargs)
    check_placed(name_of(operator), (("grad_output", gradient), ("input", input), ("indices", indices)))
    specs = (_torch.spec_of(tensor) for tensor in (gradient, input, indices))
    plan = plan_adaptive_backward(name_of(operator), *specs, spatial_of(operator))
    layouts = plan.layouts
    if layouts.tiling is None:
        return layouts.outside(gradient)
    tiling = layouts.tiling
    gy, at = (move(tensor, layout) for tensor, layout in zip((gradient, indices), layouts.operands, strict=True))
    # What needs no gradient the compiler may run with the forward pass, on some ranks only: so the indices need it.
    fetches = [tiling.fetch_targets(gy), tiling.fetch_targets(_torch.tie(at, gy))]
    gy, at = (fetch.complete().read(tiling.readers) for fetch in fetches)
    along = coordinates(at, [side.windows.source_size for side in plan.sides])
    for side, index in zip(plan.sides, along, strict=True):
        if side.dim in tiling.dims:  # a maximum on another rank is that rank's to add
            mine = (index >= side.sources.start) & (index < side.sources.stop)
            gy = torch.where(mine, gy, 0)
    own = [len(side.sources) for side in plan.sides]
    gx = gy.new_zeros([*gy.shape[: plan.first], prod(own)])
    if gx.numel() and gy.numel():
        local = [
            (index - side.sources.start).clamp(0, len(side.sources) - 1)
            for side, index in zip(plan.sides, along, strict=True)
        ]
        gx.scatter_add_(-1, flatten(local, own).flatten(plan.first), gy.flatten(plan.first))
    for fetch in fetches:
        gx = fetch.tie(gx)
    return layouts.finish(gx.view(*gy.shape[: plan.first], *own))


def _padded_windows(x: torch.Tensor, sides: Sequence[Side]) -> torch.Tensor:
    """All windows one behind the other, padded to one length."""
    for side in sides:
        if not side.padded_windows.trivial or len(side.padded_windows.positions) != x.shape[side.dim]:
            x = x.index_select(side.dim, side.positions.on(x.device))
    return x


def _source_of(index: torch.Tensor, side: Side) -> torch.Tensor:
    """The sources at these indices of padded windows."""
    if side.padded_windows.trivial:
        return index + side.sources.start
    return side.positions.on(index.device)[index] + side.sources.start


def _keep_better(best: torch.Tensor, at: torch.Tensor, value: torch.Tensor, index: torch.Tensor) -> None:
    """In place. As on one device, the first of equal numbers wins, and the last of what is not a number."""
    better = (at < 0) | (value > best) | ((value == best) & (index < at))
    better |= value.isnan() & (~best.isnan() | (index > at))
    best.copy_(torch.where(better, value, best))
    at.copy_(torch.where(better, index, at))
