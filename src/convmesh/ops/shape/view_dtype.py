"""The same memory, seen as numbers of another type."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor.placement_types import Placement, Replicate, Shard

from ... import _torch
from ...sharding.errors import refuse
from ...sharding.layout import Layout
from ...sharding.plan_cache import planned
from ...sharding.redistribute import check_placed, move
from ...sharding.registry import Behaviour, rule
from .slice_split import view_of

aten = torch.ops.aten


@rule(
    aten.view.dtype,
    behaviour=Behaviour(
        "all dimensions",
        "nothing; Partial sums are reduced",
        "a sharded last dimension whose parts would be others in the other type",
    ),
)
def view_as_type(operator: _torch.Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    input, dtype = _torch.arguments(operator, args, kwargs)
    (spec,) = check_placed("view", (("input", input),))
    source, output = _plan_type(spec, dtype)
    if input.placements == source.placements and output.present:
        return view_of(operator, args, kwargs, output)
    return _torch.wrap(move(input, source).view(dtype), output.spec)


@planned
def _plan_type(spec: _torch.Spec, dtype: torch.dtype) -> tuple[Layout, Layout]:
    layout = Layout.of(spec)
    placements: tuple[Placement, ...] = tuple(p if type(p) is Shard else Replicate() for p in layout.placements)
    source = layout.placed(placements)
    seen = torch.empty_strided(layout.shape, layout.stride, dtype=layout.dtype, device="meta").view(dtype)
    output = Layout(layout.mesh, placements, tuple(seen.shape), tuple(seen.stride()), dtype)
    last = len(layout.shape) - 1
    if last in source.sharded_dims and layout.dtype.itemsize != dtype.itemsize:
        bytes_before = source.shards(last).scaled_runs(layout.dtype.itemsize)
        if bytes_before != output.shards(last).scaled_runs(dtype.itemsize):
            raise refuse("view", f"parts of the last dimension would be others in {dtype}", (("input", layout),),
                         "shard another dimension, or one that all ranks have the same of")  # fmt: skip
    return source, output
