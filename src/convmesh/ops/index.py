"""Indexing with tensors of indices, of one dimension or of several together, and the gradient that torch makes of it.

As for `index_select`, every rank takes what it owns, and has nothing to add for the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement, Shard

from .. import _torch
from ..sharding.cache import planned
from ..sharding.dispatch import check_placed, move
from ..sharding.layout import Layout, dense_stride
from ..sharding.registry import Behaviour, rule
from .gather_index import P, local_index, owned, plan_add
from .remap_plan import settled

aten = torch.ops.aten

INDEX = Behaviour(
    "indexing", "all dimensions, pending sums", "nothing: along indexed dimensions a pending sum; with a mask, or of "
    "bools, what torch's DTensor gathers",
)  # fmt: skip
PUT = Behaviour(
    "indexing", "all dimensions, pending sums", "operands that lie differently, where values are added; else what "
    "torch's DTensor gathers",
)  # fmt: skip


@dataclass(frozen=True)
class Indexed:
    """Which dimensions are indexed, by tensors of one shape, and where the dimensions of the result come from."""

    dims: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def first(self) -> int:
        """Where the indices' own dimensions are in the result: in place of dimensions side by side, else in front."""
        together = self.dims == tuple(range(self.dims[0], self.dims[-1] + 1))
        return self.dims[0] if together else 0

    def place(self, dim: int) -> int:
        """Where a dimension is in the result that is not indexed."""
        before = dim - sum(indexed < dim for indexed in self.dims)
        return before + (len(self.shape) if before >= self.first else 0)

    def of(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        rest = tuple(size for dim, size in enumerate(shape) if dim not in self.dims)
        return (*rest[: self.first], *self.shape, *rest[self.first :])


def _read(input: Any, indices: Sequence[Any]) -> tuple[Indexed, list[torch.Tensor]] | None:
    """The indices by dimension, counted from the start; None where one is a mask, whose result has any size."""
    given = [(dim, index) for dim, index in enumerate(indices) if index is not None]
    if not given or any(index.dtype not in (torch.int64, torch.int32) for _, index in given):
        return None
    local = torch.broadcast_tensors(*(local_index(index).long() for _, index in given))
    dims = tuple(dim for dim, _ in given)
    counted = [torch.where(at < 0, at + input.shape[dim], at) for dim, at in zip(dims, local, strict=True)]
    return Indexed(dims, tuple(local[0].shape)), counted


def _mine(where: Indexed, at: list[torch.Tensor], layout: Layout) -> tuple[list[Any], torch.Tensor | None]:
    """Indices into this rank's part, by dimension, and which of them it owns; None for all of them."""
    mine: torch.Tensor | None = None
    local: list[Any] = [None] * (where.dims[-1] + 1)
    for dim, index in zip(where.dims, at, strict=True):
        local[dim] = index
        if dim in layout.cuts:
            local[dim], here = owned(index, layout.own(dim), layout.shape[dim])
            mine = here if mine is None else mine & here
    return local, mine


def _masked(where: Indexed, values: torch.Tensor, mine: torch.Tensor | None) -> torch.Tensor:
    if mine is None:
        return values
    after = values.dim() - where.first - len(where.shape)
    return values.masked_fill((~mine).reshape(*where.shape, *[1] * after), 0)


@planned
def plan_index(spec: _torch.Spec, where: Indexed) -> tuple[Layout, Layout]:
    layout = Layout.of(spec)
    source = layout.placed(tuple(settled(p) for p in layout.placements))
    placements: tuple[Placement, ...] = tuple(
        p if not isinstance(p, Shard) else P if p.dim in where.dims else Shard(where.place(p.dim))
        for p in source.placements
    )
    shape = where.of(layout.shape)
    return source, Layout(layout.mesh, placements, shape, dense_stride(shape, torch.contiguous_format), layout.dtype)


@rule(aten.index.Tensor, behaviour=INDEX)
def index(operator: _torch.Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    input, indices = _torch.arguments(operator, args, kwargs)
    found = _read(input, indices) if isinstance(input, DTensor) and input.dtype != torch.bool else None
    if found is None:
        return _torch.stock(operator, args, kwargs)
    check_placed("index", (("input", input),))
    where, at = found
    source, output = plan_index(_torch.spec_of(input), where)
    x = move(input, source)
    if source.mesh.get_coordinate() is None:
        return _torch.wrap(x.new_empty(0), output.spec)
    local, mine = _mine(where, at, source)
    if mine is not None and not x.numel():
        return _torch.wrap(x.new_zeros(output.local_shape), output.spec)
    return _torch.wrap(_masked(where, aten.index.Tensor(x, local), mine).contiguous(), output.spec)


@rule(aten.index_put.default, behaviour=PUT)
def index_put(operator: _torch.Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The gradient of `index` adds; what replaces is left to DTensor."""
    whole, indices, values, adds = _torch.arguments(operator, args, kwargs)
    if not adds or not isinstance(whole, DTensor) or not isinstance(values, DTensor):
        return _torch.stock(operator, args, kwargs)
    found = _read(whole, indices)
    if found is None or tuple(values.shape) != found[0].of(tuple(whole.shape)):
        return _torch.stock(operator, args, kwargs)
    check_placed("index_put", (("whole", whole), ("values", values)))
    where, at = found
    beside = tuple(None if dim in where.dims else where.place(dim) for dim in range(whole.dim()))
    placed, given, output = plan_add("index_put", _torch.spec_of(whole), _torch.spec_of(values), beside)
    x, added = move(whole, placed), move(values, given)
    if output.mesh.get_coordinate() is None or not x.numel():
        return _torch.wrap(x.clone(), output.spec)
    local, mine = _mine(where, at, output)
    result = aten.index_put.default(x, local, _masked(where, added, mine), True)
    return _torch.wrap(result.contiguous(), output.spec)
