"""Diagonals of matrices that are sharded: single places, which each rank has some of."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Shard

from ... import _torch
from ...sharding.call import copy_of
from ...sharding.gradient_placements import remember
from ...sharding.layout import Layout
from ...sharding.plan_cache import planned
from ...sharding.redistribute import check_placed
from ...sharding.registry import Behaviour, rule
from ..shape.slice_split import sharded, view_of

aten = torch.ops.aten

DIAGONAL = Behaviour("all other dimensions", "nothing: of a sharded matrix Partial(sum)")
WRITTEN = Behaviour("all dimensions", "operands of other placements")


@rule(aten.diagonal.default, behaviour=DIAGONAL)
def diagonal(operator: _torch.Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    input, offset, first, second = _torch.arguments(operator, args, kwargs)
    check_placed("diagonal", (("input", input),))
    if not any(sharded(input, dim % max(1, input.dim())) for dim in (first, second)):
        return view_of(operator, (input, offset, first, second), {}, _plan(_torch.spec_of(input), *args[1:]))
    remember(_torch.spec_of(input))  # its gradient is written into zeros
    return _taken(input, offset, first, second)


@planned
def _plan(spec: _torch.Spec, offset: int = 0, first: int = 0, second: int = 1) -> Layout:
    """The layout of the diagonals of matrices that are not sharded themselves."""
    layout = Layout.of(spec)
    seen = aten.diagonal.default(torch.empty_strided(layout.shape, layout.stride, device="meta"), offset, first, second)
    matrix = {first % len(layout.shape), second % len(layout.shape)}
    kept = [dim for dim in range(len(layout.shape)) if dim not in matrix]
    placements = tuple(Shard(kept.index(p.dim)) if isinstance(p, Shard) else p for p in layout.placements)
    return Layout(layout.mesh, placements, tuple(seen.shape), tuple(seen.stride()), layout.dtype)


def _taken(input: DTensor, offset: int, first: int, second: int) -> DTensor:
    order, _, places = _places(tuple(input.shape), offset, first, second, input.device.type)
    return copy_of(
        aten.index.Tensor(aten.permute.default(input, order), places), input,
        lambda full: _taken(full, offset, first, second),
        lambda full, part: aten.diagonal_scatter.default(full, part, offset, first, second),
    )  # fmt: skip


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


@rule(aten.diagonal_scatter.default, behaviour=WRITTEN)
def diagonal_scatter(operator: _torch.Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> DTensor:
    input, values, offset, first, second = _torch.arguments(operator, args, kwargs)
    check_placed("diagonal_scatter", (("input", input), ("values", values)))
    order, back, places = _places(tuple(input.shape), offset, first, second, input.device.type)
    written = aten.index_put.default(aten.permute.default(input, order), places, values)
    return aten.clone.default(aten.permute.default(written, back), memory_format=torch.contiguous_format)  # type: ignore[no-any-return]


@rule(aten.diagonal_backward.default, behaviour=WRITTEN)
def diagonal_backward(operator: _torch.Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> DTensor:
    gradient, sizes, *where = args
    return diagonal_scatter(
        aten.diagonal_scatter.default, (aten.new_zeros.default(gradient, sizes), gradient, *where), {}
    )
