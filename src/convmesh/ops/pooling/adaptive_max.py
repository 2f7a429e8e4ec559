"""Adaptive max pooling, and its gradient."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from ... import _torch
from ...comm import Halo, Held, start
from ...sharding.layout import Layout
from ...sharding.redistribute import check_placed, move
from ...sharding.registry import Behaviour, rule
from .adaptive_plan import PARTS, AdaptivePlan, Side, contributions, plan_adaptive, plan_adaptive_backward
from .flat_index import coordinates, flatten
from .window import STAYS, name_of, spatial_of

aten = torch.ops.aten

MAXIMUM = {2: aten.max_pool2d_with_indices.default, 3: aten.max_pool3d_with_indices.default}


@rule(
    aten.adaptive_max_pool2d.default,
    aten.adaptive_max_pool3d.default,
    behaviour=Behaviour(STAYS, f"{PARTS}, and its index; pending sums are reduced first"),
)
def adaptive_max(operator: _torch.Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[DTensor, DTensor]:
    input, sizes = _torch.arguments(operator, args, kwargs)
    check_placed(name_of(operator), (("input", input),))
    sizes = tuple(map(int, sizes)) * (spatial_of(operator) // len(sizes))
    plan = plan_adaptive(name_of(operator), _torch.spec_of(input), sizes, False)
    layouts, target = plan.layouts, plan.layouts.wanted
    at = Layout(target.mesh, target.placements, target.shape, target.stride, torch.int64)
    if layouts.reach is None:
        return layouts.outside(input), _torch.wrap(_torch.local_of(input).new_empty(0, dtype=torch.int64), at.spec)
    x = move(input, layouts.operands[0])
    shape = _touched_shape(plan, x)
    values, indices = x.new_empty(shape), x.new_empty(shape, dtype=torch.int64)
    if values.numel():
        width = [side.slots.width for side in plan.sides]
        laid = _laid_out(x, plan.sides)
        laid = laid if plan.first > 1 else laid.contiguous()  # its kernels take channels and volume for an image
        values, indices = MAXIMUM[len(width)](laid, width, width)
        along = coordinates(indices, laid.shape[plan.first :])
        along = [_source_of(slot, side) for slot, side in zip(along, plan.sides, strict=True)]
        indices = flatten(along, [side.source_size for side in plan.sides])
    values, indices = _greatest(values, indices, plan)
    return layouts.finish(values), _torch.wrap(indices.contiguous(memory_format=at.memory_format), at.spec)


@rule(
    aten.adaptive_max_pool2d_backward.default,
    aten.adaptive_max_pool3d_backward.default,
    behaviour=Behaviour(f"{STAYS}, pending sums", f"{PARTS}, and its index"),
)
def adaptive_max_backward(operator: _torch.Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> DTensor:
    gradient, input, indices = _torch.arguments(operator, args, kwargs)
    check_placed(name_of(operator), (("grad_output", gradient), ("input", input), ("indices", indices)))
    specs = (_torch.spec_of(tensor) for tensor in (gradient, input, indices))
    plan = plan_adaptive_backward(name_of(operator), *specs, spatial_of(operator))
    layouts = plan.layouts
    if layouts.reach is None:
        return layouts.outside(gradient)
    reach = layouts.reach
    gy, at = (move(tensor, layout) for tensor, layout in zip((gradient, indices), layouts.operands, strict=True))
    # What needs no gradient the compiler may run with the forward pass, on some ranks only: so the indices need it.
    fetches = [reach.fetch_touched(gy), reach.fetch_touched(_torch.tie(at, gy))]
    gy, at = (fetch.held.read(reach.touched) for fetch in fetches)
    along = coordinates(at, [side.source_size for side in plan.sides])
    for side, index in zip(plan.sides, along, strict=True):
        if side.dim in reach.dims:  # a maximum on another rank is that rank's to add
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


def _touched_shape(plan: AdaptivePlan, x: torch.Tensor) -> list[int]:
    return [*x.shape[: plan.first], *(len(side.touched) for side in plan.sides)]


def _laid_out(x: torch.Tensor, sides: Sequence[Side]) -> torch.Tensor:
    """All windows side by side."""
    for side in sides:
        if not side.slots.trivial or len(side.slots.positions) != x.shape[side.dim]:
            x = x.index_select(side.dim, side.positions.on(x.device))
    return x


def _source_of(slot: torch.Tensor, side: Side) -> torch.Tensor:
    if side.slots.trivial:
        return slot + side.sources.start
    return side.positions.on(slot.device)[slot] + side.sources.start


def _greatest(values: torch.Tensor, indices: torch.Tensor, plan: AdaptivePlan) -> tuple[torch.Tensor, torch.Tensor]:
    """Of all ranks' maxima for this rank's targets the greatest, and where it is."""
    reach = plan.layouts.reach
    assert reach is not None
    for dim, cut, line in zip(reach.dims, reach.cuts, reach.lines, strict=True):
        numbered, starts = contributions(cut.target_plan)
        own = (numbered.owned[line.rank],)
        coming = [
            (Held.own(tensor, (dim,), own), start([Held.own(tensor, (dim,), own)], [Halo(0, numbered, own)], line))
            for tensor in (values, indices)
        ]
        held = [mine.plus(pending.finish()[0]) for mine, pending in coming]
        wanted = cut.targets[line.rank]
        shape = [*values.shape]
        shape[dim] = len(wanted)
        best = [values.new_empty(shape), indices.new_full(shape, -1)]
        for (touched,), first in zip(cut.target_plan.needed, starts, strict=False):
            if common := touched & wanted:
                parts = [one.read((common.shift(first - touched.start),)) for one in held]
                places = [one.narrow(dim, common.start - wanted.start, len(common)) for one in best]
                _keep_better(*places, *parts)
        received = [pending.received for _, pending in coming]
        values, indices = _torch.tie(best[0], values, indices, tokens=received), best[1]
    return values, indices


def _keep_better(best: torch.Tensor, at: torch.Tensor, value: torch.Tensor, index: torch.Tensor) -> None:
    """In place. As on one device, the first of equal numbers wins, and the last of what is not a number."""
    better = (at < 0) | (value > best) | ((value == best) & (index < at))
    better |= value.isnan() & (~best.isnan() | (index > at))
    best.copy_(torch.where(better, value, best))
    at.copy_(torch.where(better, index, at))
