"""Indexing one dimension with a 1-d index: `index_select`, and `index_add`.

Every rank reads what it owns of the indices, and contributes zeros for the others: along a sharded dimension the result
is Partial(sum). No rank has to know the values of the indices in advance, so this compiles and never synchronizes with
the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from ... import _torch
from ...geometry import Interval
from ...sharding.call import Call
from ...sharding.errors import Unfit
from ...sharding.layout import Layout
from ...sharding.plan_rule import Made, plan_rule
from ...sharding.redistribute import move
from ...sharding.registry import Behaviour
from ...sharding.sharding_table import Assignment, P, R, Row, Shard, choose, input_placements, output_placements
from .._core.index_bounds import check_bounds, raise_on_all_ranks
from .common import leaves_ranks_empty, replication_price, with_index

aten = torch.ops.aten

INDEX = Behaviour(
    "all dimensions, Partial(sum); the result is Partial(sum) where an indexed dimension was sharded",
    "nothing; all-gather of sharded indices",
)
ADD = Behaviour("all dimensions, Partial(sum)", "operands with other placements; all-gather of sharded indices")


def local_index(index: Any) -> torch.Tensor:
    """Return the full index as a local tensor. A plain tensor is a constant, the same on every rank."""
    if not isinstance(index, DTensor):
        return index  # type: ignore[no-any-return]
    layout = Layout.of(_torch.spec_of(index))
    return move(index, layout.replicated())  # type: ignore[no-any-return]


def owned(index: torch.Tensor, own: Interval, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the indices into the local tensor, clamped to it, and a mask of those that this rank owns."""
    check_bounds(index, size)
    mine = (index >= own.start) & (index < own.stop)
    return (index - own.start).clamp(0, max(0, len(own) - 1)), mine


@plan_rule(aten.index_select.default, behaviour=INDEX, remembers=True, completes=with_index)
def index_select(operator: _torch.Operator, input: Layout, dim: int, index: Layout) -> Call | Made:
    rank = max(1, input.ndim)
    if index.ndim > 1 or not -rank <= dim < rank or (input.ndim == 0 and prod(index.shape) != 1):
        raise Unfit(f"{tuple(index.shape)} indices of dimension {dim}",
                    "give a 1-d index, which has one index for a 0-d input")  # fmt: skip
    if input.ndim == 0:
        return lambda x, *where: aten.view.default(operator(aten.unsqueeze.default(x, 0), *where), [])
    dim %= rank
    source, size = input.without_partial("sum"), input.shape[dim]
    is_sharded = dim in source.sharded_dims
    placements = (P if p == Shard(dim) else p for p in source.placements)
    output = input.new((*input.shape[:dim], prod(index.shape), *input.shape[dim + 1 :]), placements)

    def run(x: torch.Tensor, _: int, index: torch.Tensor) -> torch.Tensor:
        at = index.reshape(-1)
        if not x.numel():
            check_bounds(at, size)
        if not is_sharded:
            return raise_on_all_ranks(lambda: x.index_select(dim, at), at, size)
        places, mine = owned(at, source.own(dim), size)
        if not x.shape[dim]:
            return x.new_zeros(output.local_shape)
        return x.index_select(dim, places).masked_fill(_along(~mine, dim, x), 0)

    return Call((source, index.replicated()), output, run)


def _along(mine: torch.Tensor, dim: int, like: torch.Tensor) -> torch.Tensor:
    """Shape the mask so that it broadcasts against `like` along `dim`."""
    return mine.view(-1, *[1] * (like.dim() - dim - 1))


def plan_add(
    operator: str, full: Layout, source: Layout, beside: Sequence[int | None], adds: bool = True
) -> tuple[Layout, Layout, Layout]:
    """Return the layouts of the full tensor, of the source that is added to it or written into it, and of the result.

    `beside` has, for each dimension of the full tensor, the matching dimension of the source; None for an indexed one.
    """
    rows = [Row("replicated", (R, R), (R,)), *([Row("sums", (P, P), (P,))] if adds else [])]
    # Along an indexed dimension each rank writes what it owns.
    rows += [Row("sharded", (Shard(d), R if b is None else Shard(b)), (Shard(d),)) for d, b in enumerate(beside)]

    def fits(assignment: Assignment) -> bool:
        placed = enumerate((full, source))
        return not any(leaves_ranks_empty(layout, input_placements(assignment, number)) for number, layout in placed)

    chosen = choose(operator, rows, (("input", full), ("source", source)), fits=fits,
                    extra=lambda row, mesh_dim: replication_price(row, mesh_dim, (full, source)))  # fmt: skip
    placed = full.placed(input_placements(chosen, 0)), source.placed(input_placements(chosen, 1))
    return *placed, full.new(full.shape, output_placements(chosen, 0))


@plan_rule(aten.index_add.default, behaviour=ADD, completes=with_index, varies=("alpha",))
def index_add(operator: _torch.Operator, full: Layout, dim: int, index: Layout, source: Layout, alpha: float) -> Call:
    dim %= max(1, full.ndim)
    beside = [None if other == dim else other for other in range(full.ndim)]
    placed, given, output = plan_add("index_add", full, source, beside)
    is_sharded, size = dim in output.sharded_dims, output.shape[dim] if output.shape else 1

    def run(x: torch.Tensor, _: int, index: torch.Tensor, values: torch.Tensor, alpha: float) -> torch.Tensor:
        at = index.reshape(-1)
        if is_sharded:
            at, mine = owned(at, output.own(dim), size)
            values = values.masked_fill(_along(~mine, dim, x), 0)
        elif not x.numel():
            check_bounds(at, size)
        if not x.numel():
            return x.clone()
        return raise_on_all_ranks(lambda: x.index_add(dim, at, values, alpha=alpha), at, size)

    return Call((placed, index.replicated(), given), output, run)
