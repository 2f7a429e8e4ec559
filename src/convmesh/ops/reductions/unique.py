"""Unique values: each rank's own are all-gathered, and made unique again."""

from __future__ import annotations

from typing import Any

import torch

from ... import _torch
from ...comm import all_gather_stacked
from ...sharding.call import Call, Reported
from ...sharding.errors import Unfit
from ...sharding.layout import Layout
from ...sharding.plan_rule import plan_rule
from ...sharding.registry import Behaviour
from .._core.index_bounds import can_route

aten = torch.ops.aten

UNIQUE = Behaviour(
    "all dimensions; values and counts are replicated, inverse indices sharded like the input",
    "all-gather of each rank's unique values", "compiled code; inverse indices of floating point values",
)  # fmt: skip


@plan_rule(aten._unique2.default, behaviour=UNIQUE, asks=can_route)
def unique(operator: _torch.Operator, input: Layout, ordered: bool, inverse: bool, counted: bool, known: bool) -> Call:
    if not known:
        raise Unfit("how many values are unique is not known in compiled code", "call it outside of torch.compile")
    if inverse and input.dtype.is_floating_point:
        raise Unfit("inverse indices need integers", "cast the input to integers, or ask for no inverse indices")
    source = input.without_partial()
    row = source.replicated().new((0,))
    places = source.typed(torch.int64).dense if inverse else row.typed(torch.int64)

    def run(local: torch.Tensor, *_: Any) -> tuple[Any, ...]:
        values, counts = _unique_of_all_ranks(local, source)
        inverse_index = torch.searchsorted(values, local.contiguous()) if inverse else counts[:0]
        counts = counts if counted else counts[:0]
        return (values, row.new(values.shape)), inverse_index, (counts, row.new(counts.shape, dtype=torch.int64))

    return Call((source,), (Reported(row), places, Reported(row.typed(torch.int64))), run)


def _unique_of_all_ranks(local: torch.Tensor, layout: Layout) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the sorted unique values of all ranks, and their counts."""
    own, counts = torch.unique(local, return_counts=True)
    mesh_dims = layout.sharded_over()
    if not mesh_dims:
        return own, counts
    lengths = all_gather_stacked(torch.tensor(len(own), device=own.device), layout.mesh, mesh_dims).tolist()
    gathered = []
    for own_tensor in (own, counts):
        padded = own_tensor.new_zeros(max(lengths))
        padded[: len(own_tensor)] = own_tensor
        sendable = padded.byte() if padded.dtype == torch.bool else padded
        all_padded = all_gather_stacked(sendable, layout.mesh, mesh_dims).to(padded.dtype)
        gathered.append(torch.cat([row[:length] for row, length in zip(all_padded, lengths, strict=True)]))
    values, places = torch.unique(gathered[0], return_inverse=True)
    return values, counts.new_zeros(len(values)).index_add_(0, places, gathered[1])
