"""`gather`: an index says which element along a dimension each output reads.

torch uses it in the gradient of max unpooling and in the double gradient of max pooling. An index may point anywhere
along its dimension. Where that is sharded, either another dimension is sharded instead, if that sends least; or, with a
replicated index, each rank reads what it owns and contributes zeros for the rest; or the indices are sent to the ranks
that own what they point to, which send the values back.
"""

from __future__ import annotations

from math import prod
from typing import Any

import torch

from ... import _torch
from ...comm import route_rows
from ...sharding.call import Call
from ...sharding.errors import Unfit
from ...sharding.layout import Layout
from ...sharding.plan_rule import Made, plan_rule
from ...sharding.registry import Behaviour
from ...sharding.sharding_table import P, R, Row, Shard, choose, input_placements, output_placements
from .._core.index_bounds import can_route, raise_on_all_ranks
from .common import (
    FETCH,
    OWNED,
    at_least_1d,
    is_routable,
    leaves_ranks_empty,
    mixes_0d,
    owner_and_offset,
    replication_price,
)
from .index_select import owned

aten = torch.ops.aten

GATHER = Behaviour(
    "all dimensions; with a replicated index, the result is Partial(sum) where the indexed dimension was sharded",
    "nothing if the indexed dimension is not sharded; else an all-to-all of the input, or of indices and results, "
    "whichever sends less; compiled code gathers the input if no other dimension has an index for every rank",
    "tensors with different numbers of dimensions, except 0-d with 1-d",
)


@plan_rule(aten.gather.default, behaviour=GATHER, remembers=True, asks=can_route)
def gather(
    operator: _torch.Operator, input: Layout, dim: int, index: Layout, sparse: bool, routes: bool
) -> Call | Made:
    if mixes_0d(input, index):
        return _as_1d
    rank = input.ndim
    if not prod(index.shape):  # torch accepts any index that is empty
        empty = input.replicated().new(index.shape)
        return Call((input, None), empty, lambda x, *_: x.new_empty(empty.local_shape))
    if rank != index.ndim or not -max(1, rank) <= dim < max(1, rank):
        raise Unfit(f"dimension {dim} of tensors of {rank} and {index.ndim} dimensions",
                    "give an index with the input's number of dimensions")  # fmt: skip
    dim %= max(1, rank)
    chosen = _choose(input, index, dim, routes)
    source, placed_index = (layout.placed(input_placements(chosen, n)) for n, layout in enumerate((input, index)))
    is_sharded, size = dim in source.sharded_dims, source.shape[dim] if rank else 1
    fetches = any(row.name == FETCH for row in chosen)

    def take(x: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        if fetches:
            owner, offset = owner_and_offset(at, placed_index, source, dim)
            route = route_rows(owner, source.mesh, source.sharded_dims[dim])
            return route.send_back(x.reshape(-1)[route.send(offset)]).view(at.shape)
        if not is_sharded:
            return x.gather(dim, at)
        local, mine = owned(at, source.own(dim), size)
        return x.gather(dim, local).masked_fill(~mine, 0) if x.shape[dim] else x.new_zeros(at.shape)

    def run(x: torch.Tensor, _: int, at: torch.Tensor, *rest: Any) -> torch.Tensor:
        already_agreed = source.sharded_dims[dim] if fetches else ()
        return raise_on_all_ranks(lambda: take(x, at), at, size, placed_index, already_agreed)

    return Call((source, placed_index), input.new(index.shape, output_placements(chosen, 0)), run)


def _as_1d(input: Any, dim: int, index: Any, sparse: bool) -> Any:
    """Run the operator with 0-d tensors as 1-d ones, and return the shape of one device."""
    return aten.view.default(aten.gather.default(*at_least_1d(input, dim, index)), list(index.shape))


def _choose(input: Layout, index: Layout, dim: int, routes: bool) -> tuple[Row, ...]:
    """Choose a row for each mesh dimension; routed rows cost what they send."""
    # Where the index is shorter than the input, the two do not have the same shards.
    alike = [d for d in range(input.ndim) if d != dim and input.shape[d] == index.shape[d]]
    rows = [Row("replicated", (R, R), (R,)), *(Row("sharded", (Shard(d), Shard(d)), (Shard(d),)) for d in alike)]
    if input.ndim:
        rows.append(Row("sharded indices", (R, Shard(dim)), (Shard(dim),)))
        if input.dtype != torch.bool:  # bools cannot be Partial(sum)
            rows.append(Row(OWNED, (Shard(dim), R), (P,)))
        if routes:
            rows += [Row(FETCH, (Shard(dim), Shard(d)), (Shard(d),)) for d in range(input.ndim)]

    def price(row: Row, mesh_dim: int) -> float:
        size = input.mesh.size(mesh_dim)
        sent = {OWNED: 2, FETCH: 3}.get(row.name, 0) * prod(index.shape) * (size - 1) / size
        return replication_price(row, mesh_dim, (input, index)) + sent / (size if row.name == FETCH else 1)

    def fits(assignment: tuple[Row, ...]) -> bool:
        """Whether indices can be routed, and no redistribution would leave half of the ranks empty."""
        return is_routable(assignment, FETCH) and not any(
            leaves_ranks_empty(layout, input_placements(assignment, n)) for n, layout in enumerate((input, index))
        )

    return choose("gather", rows, (("input", input), ("index", index)), fits=fits, extra=price)
