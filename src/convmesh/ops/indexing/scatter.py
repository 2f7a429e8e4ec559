"""`scatter`, `scatter_add` and `scatter_reduce`: an index says where along a dimension each source value goes.

torch uses these as gradients of `gather`, sorting, and min and max. Along a sharded dimension each rank writes what it
owns: values and indices are replicated for that, or sent to the ranks that own their positions, whichever costs less.
"""

from __future__ import annotations

from math import prod
from typing import Any

import torch

from ... import _torch
from ...comm import route_rows
from ...sharding.call import Call
from ...sharding.errors import Unfit
from ...sharding.gradient_placements import Placements, placements_of
from ...sharding.layout import Layout
from ...sharding.plan_rule import Made, plan_rule
from ...sharding.registry import Behaviour
from ...sharding.sharding_table import R, Row, Shard, Wanted, choose, input_placements, output_placements
from .._core.index_bounds import can_route, check_bounds, raise_on_all_ranks
from .common import (
    OWNED,
    SEND,
    at_least_1d,
    is_routable,
    leaves_ranks_empty,
    mixes_0d,
    owner_and_offset,
    replication_price,
)

aten = torch.ops.aten

SCATTER = Behaviour(
    "all dimensions",
    "nothing if the indexed dimension is not sharded; else indices and values, to the owners of their positions; on "
    "CPUs also an all-reduce of one value, which says whether any of the sharded indices is bad",
    "an input and an index with different numbers of dimensions, except 0-d with 1-d",
)  # fmt: skip
ZEROS = Behaviour("all dimensions; in backward, zeros for a gradient are placed like its tensor", "nothing")


def _runtime_facts(full: _torch.Spec, *_: Any) -> tuple[bool, Placements | None]:
    """Return whether values may be routed and, in backward, the placements that a tensor of this shape had."""
    return can_route(), placements_of(full.mesh, tuple(full.shape))


@plan_rule(
    aten.scatter.src, aten.scatter_.src, aten.scatter.value, aten.scatter_.value,
    aten.scatter_add.default, aten.scatter_add_.default, aten.scatter_reduce.two, aten.scatter_reduce_.two,
    aten.scatter.reduce, aten.scatter_.reduce, aten.scatter.value_reduce, aten.scatter_.value_reduce,
    behaviour=SCATTER, asks=_runtime_facts, varies=("value",),
)  # fmt: skip
def scatter(operator: _torch.Operator, full: Layout, dim: int, index: Layout, source: Any, *how: Any) -> Call | Made:
    writes, functional = operator._schema.is_mutable, _torch.functional_of(operator) or operator
    *_, (routes, preferred) = how
    values = source if isinstance(source, Layout) else None
    if mixes_0d(full, index, values):
        return lambda *tensors: _as_1d(functional, writes, *tensors)
    tensors, rank = [tensor for tensor in (full, index, values) if tensor is not None], full.ndim
    if not prod(index.shape):  # torch accepts any index that is empty
        return Call(tensors, full if writes else full.dense, lambda x, *_: x if writes else x.clone(), writes=writes)
    if any(tensor.ndim != rank for tensor in tensors) or not -max(1, rank) <= dim < max(1, rank):
        raise Unfit(f"dimension {dim} of tensors of {[tensor.ndim for tensor in tensors]} dimensions",
                    "give all of them the same number of dimensions")  # fmt: skip
    dim %= max(1, rank)
    chosen = _choose(_torch.name_of(operator), tensors, dim, routes, full.placements if writes else preferred)
    placed = [tensor.placed(input_placements(chosen, number)) for number, tensor in enumerate(tensors)]
    target, placed_index = placed[:2]
    sends, size = any(row.name == SEND for row in chosen), target.shape[dim] if rank else 1

    def write(x: torch.Tensor, at: torch.Tensor, source: Any, *how: Any) -> torch.Tensor:
        if dim not in target.sharded_dims:
            return call(x, dim, at, source, *how)
        if sends:
            return call(x.reshape(-1), 0, *_routed(target, placed_index, dim, at, source), *how).view(x.shape)
        check_bounds(at, size)
        own = target.own(dim)
        mine = (at >= own.start) & (at < own.stop)
        # Other ranks' values go to one extra index, which is removed.
        padded = torch.cat([x, x.new_zeros([*x.shape[:dim], 1, *x.shape[dim + 1 :]])], dim)
        written = call(padded, dim, torch.where(mine, at - own.start, len(own)), source, *how)
        return written.narrow(dim, 0, len(own))

    def call(*values: Any) -> torch.Tensor:
        result: torch.Tensor = _torch.call(functional, values)
        return result

    def run(x: torch.Tensor, _: int, at: torch.Tensor, *rest: Any) -> torch.Tensor:
        already_agreed = target.sharded_dims[dim] if sends else ()
        return raise_on_all_ranks(lambda: write(x, at, *rest), at, size, placed_index, already_agreed)

    return Call(placed, full.new(full.shape, output_placements(chosen, 0)), run, writes=writes)


def _as_1d(functional: _torch.Operator, writes: bool, full: Any, *rest: Any) -> Any:
    """Run the operator with 0-d tensors as 1-d ones, and return the shape of one device."""
    result = aten.view.default(_torch.call(functional, at_least_1d(full, *rest)), list(full.shape))
    return aten.copy_.default(full, result) if writes else result


def _routed(target: Layout, placed_index: Layout, dim: int, at: torch.Tensor, source: Any) -> tuple[torch.Tensor, Any]:
    """Return the flat offsets into this rank's elements, and the values for them, received from all ranks."""
    owner, offset = owner_and_offset(at, placed_index, target, dim)
    route = route_rows(owner, target.mesh, target.sharded_dims[dim])
    if isinstance(source, torch.Tensor) and source.dim():
        source = route.send(source[tuple(slice(size) for size in at.shape)].reshape(-1))
    return route.send(offset), source


def _choose(
    operator: str, tensors: list[Layout], dim: int, routes: bool, preferred: Placements | None
) -> tuple[Row, ...]:
    """Choose a row for each mesh dimension; routed rows cost what they send."""
    full, index, *values = tensors
    rank, count = full.ndim, len(tensors)
    alike = [d for d in range(rank) if d != dim and all(layout.shape[d] == full.shape[d] for layout in tensors)]
    rows = [Row("replicated", (R,) * count, (R,)), *(Row("sharded", (Shard(d),) * count, (Shard(d),)) for d in alike)]
    if rank:
        rows.append(Row(OWNED, (Shard(dim), *(R,) * (count - 1)), (Shard(dim),)))
    if rank and routes and all(tensor.shape == index.shape for tensor in values):
        rows += [Row(SEND, (Shard(dim), *(Shard(d),) * (count - 1)), (Shard(dim),)) for d in range(rank)]

    def price(row: Row, mesh_dim: int) -> float:
        size = full.mesh.size(mesh_dim)
        sent = count * prod(index.shape) * (size - 1) / size / size if row.name == SEND else 0
        return replication_price(row, mesh_dim, tensors) + sent

    def fits(assignment: tuple[Row, ...]) -> bool:
        return is_routable(assignment, SEND) and not any(
            leaves_ranks_empty(layout, input_placements(assignment, number)) for number, layout in enumerate(tensors)
        )

    named = list(zip(("input", "index", "source"), tensors, strict=False))
    wanted = [] if preferred is None else [Wanted(preferred, prod(full.shape))]
    return choose(operator, rows, named, wanted, fits=fits, extra=price)


def _remembered_placements(like: _torch.Spec, sizes: tuple[int, ...], *_: Any) -> Placements | None:
    """The placements, if they are remembered, of the tensor whose gradient these zeros become."""
    return placements_of(like.mesh, sizes) if prod(sizes) else None


@plan_rule(aten.new_zeros.default, behaviour=ZEROS, asks=_remembered_placements, foreign=True)
def new_zeros(
    operator: _torch.Operator, like: Layout, sizes: tuple[int, ...], dtype: torch.dtype | None, *rest: Any
) -> Call | None:
    """Place zeros that a gradient is written into like the tensor itself, if its placements were remembered."""
    *_, placements = rest
    if placements is None:
        return None
    zeros = like.new(sizes, placements, dtype)
    return Call((like,), zeros, lambda x, *_: x.new_zeros(zeros.local_shape, dtype=zeros.dtype))
