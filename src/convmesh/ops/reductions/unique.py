"""Different values: each rank's own, and of those together again."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor

from ... import _torch
from ...comm import all_gather_stacked
from ...sharding.errors import refuse
from ...sharding.layout import Layout
from ...sharding.redistribute import check_placed, move
from ...sharding.registry import Behaviour, rule

aten = torch.ops.aten

UNIQUE = Behaviour(
    "the values, and where each one is found", "each rank's different values, to all other ranks",
    "compiled code; where floating point values are found",
)  # fmt: skip


@rule(aten._unique2.default, behaviour=UNIQUE)
def unique(operator: _torch.Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[DTensor, ...]:
    input, _, inverse, counted = _torch.arguments(operator, args, kwargs)
    (spec,) = check_placed("unique", (("input", input),))
    if _torch.tracing() or (inverse and input.dtype.is_floating_point):
        raise refuse("unique", "compiled code knows no values, and floating point numbers are not looked up",
                     (("input", input),), "call it on labels, outside of torch.compile")  # fmt: skip
    layout = Layout.of(spec).without_partial()
    local = move(input, layout)
    values, counts = local.new_empty(0), local.new_empty(0, dtype=torch.int64)
    found = counts
    if layout.present:
        values, counts = _of_all(local, layout)
        found = torch.searchsorted(values, local.contiguous()) if inverse else found
    counts = counts if counted else counts[:0]
    return (
        _torch.wrap(values, _row(layout, values).spec),
        _torch.wrap(found, (layout.typed(torch.int64).dense if inverse else _row(layout, found)).spec),
        _torch.wrap(counts, _row(layout, counts).spec),
    )


def _of_all(local: torch.Tensor, layout: Layout) -> tuple[torch.Tensor, torch.Tensor]:
    """The different values in their order, and how often each one is there."""
    own, counts = torch.unique(local, return_counts=True)
    mesh_dims = layout.sharded_over()
    if not mesh_dims:
        return own, counts
    lengths = all_gather_stacked(torch.tensor(len(own), device=own.device), layout.mesh, mesh_dims).tolist()
    together = []
    for mine in (own, counts):
        room = mine.new_zeros(max(lengths))
        room[: len(mine)] = mine
        wide = room.byte() if room.dtype == torch.bool else room
        everyone = all_gather_stacked(wide, layout.mesh, mesh_dims).to(room.dtype)
        together.append(torch.cat([row[:length] for row, length in zip(everyone, lengths, strict=True)]))
    values, places = torch.unique(together[0], return_inverse=True)
    return values, counts.new_zeros(len(values)).index_add_(0, places, together[1])


def _row(layout: Layout, values: torch.Tensor) -> Layout:
    """Replicated."""
    return layout.replicated().new(values.shape, dtype=values.dtype)
