"""The same storage viewed as another dtype."""

from __future__ import annotations

import torch

from ... import _torch
from ...sharding.call import Call
from ...sharding.errors import Unfit
from ...sharding.layout import Layout
from ...sharding.plan_rule import plan_rule
from ...sharding.registry import Behaviour

aten = torch.ops.aten


@plan_rule(
    aten.view.dtype,
    behaviour=Behaviour(
        "all dimensions", "nothing; Partial inputs are reduced",
        "a sharded last dimension whose shards would begin at other bytes in the new dtype",
    ),
)  # fmt: skip
def view_as_type(operator: _torch.Operator, input: Layout, dtype: torch.dtype) -> Call:
    source, last = input.without_partial(), input.ndim - 1
    with _torch.no_modes():
        viewed = torch.empty_strided(input.shape, input.stride, dtype=input.dtype, device="meta").view(dtype)
    output = Layout(input.mesh, source.placements, tuple(viewed.shape), tuple(viewed.stride()), dtype)
    if last in source.sharded_dims and input.dtype.itemsize != dtype.itemsize:
        bytes_before = source.shards(last).scaled_runs(input.dtype.itemsize)
        if bytes_before != output.shards(last).scaled_runs(dtype.itemsize):
            raise Unfit(f"shards of the last dimension would begin at other bytes in {dtype}",
                        "shard another dimension, or a last one that divides evenly among the ranks")  # fmt: skip
    return Call((source,), output, operator, view=source.placements == input.placements)
