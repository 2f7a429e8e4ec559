"""Diagonals of sharded matrices: single elements, of which each rank owns some."""

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

DIAGONAL = Behaviour("all dimensions; the result is Partial(sum) where the matrix was sharded", "nothing")
SCATTER = Behaviour("all dimensions", "operands with other placements")


@plan_rule(aten.diagonal.default, behaviour=DIAGONAL)
def diagonal(operator: _torch.Operator, input: Layout, offset: int, first: int, second: int) -> Call | Made:
    matrix = {dim % max(1, input.ndim) for dim in (first, second)}
    if not input.sharded_dims.keys().isdisjoint(matrix):
        return _copy_diagonal
    with _torch.no_modes():
        viewed = operator(torch.empty_strided(input.shape, input.stride, device="meta"), offset, first, second)
    kept = [dim for dim in range(input.ndim) if dim not in matrix]
    placements = tuple(Shard(kept.index(p.dim)) if isinstance(p, Shard) else p for p in input.placements)
    output = Layout(input.mesh, placements, tuple(viewed.shape), tuple(viewed.stride()), input.dtype)
    return Call((input,), output, operator, view=True)


def _copy_diagonal(input: DTensor, offset: int, first: int, second: int) -> Any:
    """Copy the diagonal of a sharded matrix; what is written into the copy is put back."""
    remember(input)  # its gradient is written into zeros
    order, _, places = _diagonal_indices(tuple(input.shape), offset, first, second, input.device.type)
    return copy_of(aten.index.Tensor(aten.permute.default(input, order), places), input, (
        lambda full: _copy_diagonal(full, offset, first, second),
        lambda full, part: aten.diagonal_scatter.default(full, part, offset, first, second),
    ))  # fmt: skip


def _diagonal_indices(
    shape: tuple[int, ...], offset: int, first: int, second: int, device: str
) -> tuple[list[int], list[int], list[torch.Tensor | None]]:
    """Return the permutation that puts the matrix last, its inverse, and the indices of the diagonal there."""
    rank = len(shape)
    matrix = [first % rank, second % rank]
    order = [*(dim for dim in range(rank) if dim not in matrix), *matrix]
    rows, columns = (shape[dim] for dim in matrix)
    count = max(0, min(rows, columns - offset) if offset >= 0 else min(rows + offset, columns))
    along = torch.arange(count, device=device)
    inverse = [order.index(dim) for dim in range(rank)]
    return order, inverse, [*[None] * (rank - 2), along + max(0, -offset), along + max(0, offset)]


@plan_rule(aten.diagonal_scatter.default, behaviour=SCATTER)
def diagonal_scatter(operator: _torch.Operator, *_: Any) -> Made:
    return _scatter_diagonal


def _scatter_diagonal(input: DTensor, values: DTensor, offset: int, first: int, second: int) -> Any:
    order, inverse, places = _diagonal_indices(tuple(input.shape), offset, first, second, input.device.type)
    written = aten.index_put.default(aten.permute.default(input, order), places, values)
    return aten.clone.default(aten.permute.default(written, inverse), memory_format=torch.contiguous_format)


@plan_rule(aten.diagonal_backward.default, behaviour=SCATTER)
def diagonal_backward(operator: _torch.Operator, *_: Any) -> Made:
    return lambda gradient, sizes, *where: _scatter_diagonal(aten.new_zeros.default(gradient, sizes), gradient, *where)
