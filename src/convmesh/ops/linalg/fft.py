"""Fourier transforms: along their dimensions every number depends on every other, so these are made whole.

Other dimensions, samples and channels, are cut over the same ranks meanwhile, which takes one message from each to each
instead of everything to everybody. The result stays there: what is done with frequencies is done for each channel, or
with few of them, and the inverse transform finds its dimensions whole.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement, Replicate, Shard

from ... import _torch
from ...sharding.gradient_placements import remember
from ...sharding.layout import Layout, dense_stride, is_sum
from ...sharding.plan_cache import planned
from ...sharding.redistribute import check_placed, move
from ...sharding.registry import Behaviour, rule

aten = torch.ops.aten

FOURIER = Behaviour(
    "dimensions that are not transformed, pending sums; a transformed one is exchanged for one of these",
    "nothing; an all-to-all where a transformed dimension is cut, a gather if there is no other",
)  # fmt: skip


@dataclass(frozen=True)
class FourierPlan:
    source: Layout
    output: Layout


@rule(aten._fft_c2c.default, aten._fft_r2c.default, aten._fft_c2r.default, behaviour=FOURIER)
def fourier(operator: _torch.Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> DTensor:
    input, dims, normalization, last = _torch.arguments(operator, args, kwargs)
    name = _torch.name_of(operator)
    (spec,) = check_placed(name, (("input", input),))
    plan = plan_fourier(operator, spec, tuple(dims), normalization, int(last))
    if operator is aten._fft_r2c.default:
        remember(plan.source.spec)  # its gradient is written into zeros of this shape
    local = move(input, plan.source)
    if plan.output.mesh.get_coordinate() is None:
        return _torch.wrap(local.new_empty(0, dtype=plan.output.dtype), plan.output.spec)
    if not local.numel():
        return _torch.wrap(local.new_empty(plan.output.local_shape, dtype=plan.output.dtype), plan.output.spec)
    return _torch.wrap(operator(local, dims, normalization, last).contiguous(), plan.output.spec)


@planned
def plan_fourier(
    operator: _torch.Operator, spec: _torch.Spec, dims: tuple[int, ...], normalization: int, last: int
) -> FourierPlan:
    layout = Layout.of(spec)
    with _torch.no_modes():
        whole = torch.empty(layout.shape, dtype=layout.dtype, device="meta")
        result = operator(whole, dims, normalization, last)
    source = layout.placed(_without(layout, {dim % len(layout.shape) for dim in dims}))
    shape = tuple(result.shape)
    stride = dense_stride(shape, torch.contiguous_format)
    return FourierPlan(source, Layout(layout.mesh, source.placements, shape, stride, result.dtype))


def _without(layout: Layout, dims: set[int]) -> tuple[Placement, ...]:
    """Placements that cut none of `dims`: instead, the dimension of which every rank has the most."""
    placements: list[Placement] = [p if isinstance(p, Shard) or is_sum(p) else Replicate() for p in layout.placements]
    free = [dim for dim, size in enumerate(layout.shape) if dim not in dims and size > 1]
    for mesh_dim, placement in enumerate(placements):
        if isinstance(placement, Shard) and placement.dim in dims:
            cuts = layout.placed(tuple(placements)).cuts
            share = {d: layout.shape[d] / prod(layout.mesh.size(m) for m in cuts.get(d, ())) for d in free}
            placements[mesh_dim] = Shard(max(free, key=lambda dim: share[dim])) if free else Replicate()
    return tuple(placements)
