"""Diagonals of matrices that are sharded: single places, which each rank has some of."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Shard

from ... import _torch
from ...sharding.call import Call, copy_of
from ...sharding.gradient_placements import remember
from ...sharding.layout import Layout
from ...sharding.plan_rule import Made, plan_rule
from ...sharding.registry import Behaviour

aten = torch.ops.aten

DIAGONAL = Behaviour("all other dimensions", "nothing: of a sharded matrix Partial(sum)")
WRITTEN = Behaviour("all dimensions", "operands of other placements")


@plan_rule(aten.diagonal.default, behaviour=DIAGONAL)
def diagonal(operator: _torch.Operator, input: Layout, offset: int, first: int, second: int) -> Call | Made:
    matrix = {dim % max(1, input.ndim) for dim in (first, second)}
    if not input.sharded_dims.keys().isdisjoint(matrix):
        return _taken
    with _torch.no_modes():
        seen = operator(torch.empty_strided(input.shape, input.stride, device="meta"), offset, first, second)
    kept = [dim for dim in range(input.ndim) if dim not in matrix]
    placements = tuple(Shard(kept.index(p.dim)) if isinstance(p, Shard) else p for p in input.placements)
    output = Layout(input.mesh, placements, tuple(seen.shape), tuple(seen.stride()), input.dtype)
    return Call((input,), output, operator, view=True)


def _taken(input: DTensor, offset: int, first: int, second: int) -> Any:
    remember(input)  # its gradient is written into zeros
    order, _, places = _places(tuple(input.shape), offset, first, second, input.device.type)
    return copy_of(aten.index.Tensor(aten.permute.default(input, order), places), input, (
        lambda full: _taken(full, offset, first, second),
        lambda full, part: aten.diagonal_scatter.default(full, part, offset, first, second),
    ))  # fmt: skip


def _places(
    shape: tuple[int, ...], offset: int, first: int, second: int, device: str
) -> tuple[list[int], list[int], list[torch.Tensor | None]]:
    """The order in which the matrix comes last, the order back, and the indices of its diagonal there."""
    rank = len(shape)
    matrix = [first % rank, second % rank]
    order = [*(dim for dim in range(rank) if dim not in matrix), *matrix]
    rows, columns = (shape[dim] for dim in matrix)
    count = max(0, min(rows, columns - offset) if offset >= 0 else min(rows + offset, columns))
    along = torch.arange(count, device=device)
    back = [order.index(dim) for dim in range(rank)]
    return order, back, [*[None] * (rank - 2), along + max(0, -offset), along + max(0, offset)]


@plan_rule(aten.diagonal_scatter.default, behaviour=WRITTEN)
def diagonal_scatter(operator: _torch.Operator, *_: Any) -> Made:
    return _scattered


def _scattered(input: DTensor, values: DTensor, offset: int, first: int, second: int) -> Any:
    order, back, places = _places(tuple(input.shape), offset, first, second, input.device.type)
    written = aten.index_put.default(aten.permute.default(input, order), places, values)
    return aten.clone.default(aten.permute.default(written, back), memory_format=torch.contiguous_format)


@plan_rule(aten.diagonal_backward.default, behaviour=WRITTEN)
def diagonal_backward(operator: _torch.Operator, *_: Any) -> Made:
    return lambda gradient, sizes, *where: _scattered(aten.new_zeros.default(gradient, sizes), gradient, *where)
