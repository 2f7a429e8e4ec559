"""Sampling at the places that a grid gives, and grids of affine maps.

A grid may point anywhere, and only its values say where. So the input is replicated in space wherever the output is
sharded; batch and channels of it may be sharded, and the grid along any dimension.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Partial, Replicate, Shard

from ... import _torch
from ...sharding.errors import refuse
from ...sharding.layout import Layout, dense_stride
from ...sharding.plan_cache import planned
from ...sharding.redistribute import check_placed, move, place
from ...sharding.registry import Behaviour, made_of_others, rule
from ...sharding.sharding_table import Row, Wanted, choose, input_placements, output_placements
from ..pooling.window import name_of, spatial_of

aten = torch.ops.aten
R, P = Replicate(), Partial()

made_of_others(aten.grid_sampler.default)

STAYS = "batch, channels, space of the grid and so of the output"
GATHERED = "an input that is sharded in space is all-gathered, because a grid may point anywhere"


@dataclass(frozen=True)
class SamplingPlan:
    """The layouts of operands, and of results as computed and as returned."""

    operands: tuple[Layout, ...]
    computed: tuple[Layout | None, ...]
    wanted: tuple[Layout | None, ...]


@rule(
    aten.grid_sampler_2d.default,
    aten.grid_sampler_3d.default,
    behaviour=Behaviour(f"{STAYS}, Partial(sum) of the input", f"nothing; {GATHERED}"),
)
def grid_sample(operator: _torch.Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> DTensor:
    input, grid, *rest = _torch.arguments(operator, args, kwargs)
    check_placed(name_of(operator), (("input", input), ("grid", grid)))
    plan = _plan(name_of(operator), _torch.spec_of(input), _torch.spec_of(grid), spatial_of(operator))
    output = plan.computed[0]
    assert output is not None
    x, at = (move(tensor, layout) for tensor, layout in zip((input, grid), plan.operands, strict=True))
    if input.device_mesh.get_coordinate() is None:
        return _torch.wrap(x.new_empty(0), output.spec)
    shape = output.local_shape
    y = operator(x, at, *rest) if prod(shape) else x.new_empty(shape)
    return _torch.wrap(y.contiguous(memory_format=output.memory_format), output.spec)


@planned
def _plan(operator: str, input_spec: _torch.Spec, grid_spec: _torch.Spec, spatial: int) -> SamplingPlan:
    input, grid = Layout.of(input_spec), Layout.of(grid_spec)
    named = (("input", input), ("grid", grid))
    _check(operator, named, input, grid, spatial)
    rows = [
        Row("replicated", (R, R), (R,)),
        Row("batch", (Shard(0), Shard(0)), (Shard(0),)),
        Row("channels", (Shard(1), R), (Shard(1),)),
        *[Row("space", (R, Shard(1 + axis)), (Shard(2 + axis),)) for axis in range(spatial)],
        Row("sum of inputs", (P, R), (P,)),
    ]
    chosen = choose(operator, rows, named)
    shape = (*input.shape[:2], *grid.shape[1:-1])
    stride = dense_stride(shape, input.memory_format)
    output = Layout(input.mesh, output_placements(chosen, 0), shape, stride, input.dtype)
    operands = tuple(layout.placed(input_placements(chosen, number)) for number, (_, layout) in enumerate(named))
    return SamplingPlan(operands, (output,), (output,))


def _check(operator: str, named: Any, input: Layout, grid: Layout, spatial: int) -> None:
    fits = len(input.shape) == len(grid.shape) == spatial + 2
    if not fits or grid.shape[-1] != spatial or grid.shape[0] != input.shape[0] or input.dtype != grid.dtype:
        raise refuse(operator, "input and grid do not belong together", named,
                     f"give input (N, C, *space) and grid (N, *space, {spatial}) of one dtype")  # fmt: skip
    if min(input.shape[2:]) < 1:
        raise refuse(operator, "the input has no spatial indices", named, "use sizes of at least 1")


@rule(
    aten.grid_sampler_2d_backward.default,
    aten.grid_sampler_3d_backward.default,
    behaviour=Behaviour(f"{STAYS}, Partial(sum) of gradients", f"nothing; {GATHERED}"),
)
def grid_sample_backward(
    operator: _torch.Operator, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[DTensor | None, ...]:
    gradient, input, grid, *rest, mask = _torch.arguments(operator, args, kwargs)
    operands = (gradient, input, grid)
    check_placed(name_of(operator), tuple(zip(("grad_output", "input", "grid"), operands, strict=True)))
    specs = (_torch.spec_of(tensor) for tensor in operands)
    plan = _plan_backward(name_of(operator), *specs, spatial_of(operator), tuple(mask))
    gy, x, at = (move(tensor, layout) for tensor, layout in zip(operands, plan.operands, strict=True))
    if input.device_mesh.get_coordinate() is None:
        return tuple(None if layout is None else _torch.wrap(gy.new_empty(0), layout.spec) for layout in plan.wanted)
    if gy.numel() and x.numel():
        results = operator(gy, x, at, *rest, mask)
    else:
        results = (torch.zeros_like(x), torch.zeros_like(at))
    kept = [result if needed else None for result, needed in zip(results, mask, strict=True)]
    return tuple(place(*entry) for entry in zip(kept, plan.computed, plan.wanted, strict=True))


@planned
def _plan_backward(
    operator: str,
    gradient_spec: _torch.Spec,
    input_spec: _torch.Spec,
    grid_spec: _torch.Spec,
    spatial: int,
    mask: tuple[bool, ...],
) -> SamplingPlan:
    gradient, input, grid = Layout.of(gradient_spec), Layout.of(input_spec), Layout.of(grid_spec)
    named = (("grad_output", gradient), ("input", input), ("grid", grid))
    _check(operator, named, input, grid, spatial)
    if gradient.shape != (*input.shape[:2], *grid.shape[1:-1]):
        raise refuse(operator, "the gradient has not the output's shape", named, "give one of that shape")
    rows = [
        Row("replicated", (R, R, R), (R, R)),
        Row("batch", (Shard(0), Shard(0), Shard(0)), (Shard(0), Shard(0))),
        Row("channels", (Shard(1), Shard(1), R), (Shard(1), P)),
        *[Row("space", (Shard(2 + axis), R, Shard(1 + axis)), (P, Shard(1 + axis))) for axis in range(spatial)],
        Row("sum of gradients", (P, R, R), (P, P)),
    ]
    results = [
        Layout(t.mesh, t.placements, t.shape, dense_stride(t.shape, t.memory_format), t.dtype) for t in (input, grid)
    ]
    # A grid is mostly made of few numbers, and its gradient summed up: no use in gathering it for that.
    wishes = [
        Wanted(r.placements, prod(r.shape), or_sharded=r is results[1]) if needed else None
        for r, needed in zip(results, mask, strict=True)
    ]
    chosen = choose(operator, rows, named, wishes)
    computed: list[Layout | None] = [None, None]
    wanted: list[Layout | None] = [None, None]
    for number, (result, wish) in enumerate(zip(results, wishes, strict=True)):
        if wish is not None:
            placements = output_placements(chosen, number)
            computed[number] = result.placed(placements)
            wanted[number] = result.placed(tuple(wish.becomes(*entry) for entry in enumerate(placements)))
    operands = tuple(layout.placed(input_placements(chosen, number)) for number, (_, layout) in enumerate(named))
    return SamplingPlan(operands, tuple(computed), tuple(wanted))
