"""Indexing with tensors, along one dimension or several.

As in `index_select`, every rank reads what it owns and contributes zeros for the rest. The indices are replicated; a
mask beside other indices becomes the indices where it is true. A mask alone takes another path (`masked_select.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement, Shard

from ... import _torch
from ...sharding.gradient_placements import remember
from ...sharding.layout import Layout
from ...sharding.plan_cache import planned
from ...sharding.redistribute import check_placed, move
from ...sharding.registry import rule
from ...sharding.sharding_table import P
from .._core.index_bounds import check_bounds
from .index_select import INDEX, local_index, owned
from .masked_select import index_masked, refuse_compiled

aten = torch.ops.aten

Indices = dict[int, torch.Tensor]
"""By indexed dimension, its indices: all broadcast to one shape, and non-negative."""


def indices_by_dim(shape: Sequence[int], indices: Sequence[torch.Tensor | None]) -> Indices:
    """Return the indices of each indexed dimension, with masks replaced by the indices where they are true."""
    by_dim: Indices = {}
    dim = 0
    for index in indices:
        if index is None:
            dim += 1
            continue
        local = local_index(index)
        mask = local.dtype in (torch.bool, torch.uint8)
        if mask:
            refuse_compiled("index", (("mask", index),))
        for places in local.nonzero(as_tuple=True) if mask else (local,):
            by_dim[dim] = _non_negative(places.long(), shape[dim])
            dim += 1
    return dict(zip(by_dim, torch.broadcast_tensors(*by_dim.values()), strict=True))


def _non_negative(places: torch.Tensor, size: int) -> torch.Tensor:
    """Make negative indices non-negative.

    An index before the start becomes `size`, which is out of range: an operator would count a negative one from the end
    once more.
    """
    return torch.where(places < 0, torch.where(places < -size, size, places + size), places)


@dataclass(frozen=True)
class MovedDims:
    """Where the dimensions of an indexed tensor are in the result: the indices' dimensions replace the indexed ones."""

    first: int  # the first dimension of the indices in the result
    shape: tuple[int, ...]
    kept: dict[int, int]  # dimension that is not indexed -> the dimension that it becomes


def move_dims(shape: tuple[int, ...], dims: tuple[int, ...], index_shape: tuple[int, ...]) -> MovedDims:
    """Return how indexing `dims` with indices of shape `index_shape` moves the dimensions of a tensor of `shape`."""
    adjacent = dims == tuple(range(dims[0], dims[0] + len(dims)))
    others = [dim for dim in range(len(shape)) if dim not in dims]
    first = dims[0] if adjacent else 0
    kept = {dim: place + (len(index_shape) if place >= first else 0) for place, dim in enumerate(others)}
    sizes = [shape[dim] for dim in others]
    return MovedDims(first, (*sizes[:first], *index_shape, *sizes[first:]), kept)


@planned
def _plan(spec: _torch.Spec, dims: tuple[int, ...], index_shape: tuple[int, ...]) -> tuple[Layout, Layout, MovedDims]:
    """Return the layouts of the input and of the result, and where the dimensions go."""
    layout = Layout.of(spec)
    moved = move_dims(layout.shape, dims, index_shape)
    source = layout.without_partial("sum")
    placements: list[Placement] = list(source.placements)
    for mesh_dim, p in enumerate(placements):
        if isinstance(p, Shard):
            placements[mesh_dim] = P if p.dim in dims else Shard(moved.kept[p.dim])
    return source, layout.new(moved.shape, tuple(placements)), moved


def local_indices(by_dim: Indices, layout: Layout) -> tuple[list[torch.Tensor | None], torch.Tensor | None]:
    """Return the indices into the local tensor, and a mask of those that this rank owns (None: all of them)."""
    local: list[torch.Tensor | None] = [by_dim.get(dim) for dim in range(len(layout.shape))]
    mine: torch.Tensor | None = None
    for dim in by_dim:
        if dim in layout.sharded_dims:
            local[dim], some = owned(by_dim[dim], layout.own(dim), layout.shape[dim])
            mine = some if mine is None else mine & some
    return local, mine


def check_indices(by_dim: Indices, layout: Layout) -> None:
    """Check the indices on a rank that has no elements of the indexed tensor, where no operator would."""
    for dim, places in by_dim.items():
        check_bounds(places, layout.shape[dim])


def zero_unowned(values: torch.Tensor, mine: torch.Tensor | None, first: int) -> torch.Tensor:
    """Return the values, with zeros where another rank owns the index."""
    if mine is None:
        return values
    behind = values.dim() - first - mine.dim()
    return values.masked_fill(~mine.reshape((*mine.shape, *[1] * behind)), 0)


def sole_mask(input: Any, indices: Sequence[Any]) -> DTensor | None:
    """Return the mask of `input[mask]`, where it covers the first dimensions and nothing else is indexed; else None."""
    used = [index for index in indices if index is not None]
    is_sole = len(used) == 1 and indices[0] is used[0] and isinstance(used[0], DTensor)
    return used[0] if is_sole and used[0].dtype == torch.bool and used[0].dim() else None


@rule(aten.index.Tensor, behaviour=INDEX)
def index(operator: _torch.Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`x[:, :, indices]`, `x[rows, columns]`, `x[mask]`.

    Not a `plan_rule`: how many indices a mask gives depends on its values, so layouts alone do not determine a plan.
    """
    input, indices = _torch.arguments(operator, args, kwargs)
    if not isinstance(input, DTensor) or input.dtype == torch.bool:  # bools cannot be Partial(sum)
        return _torch.stock(operator, args, kwargs)
    check_placed("index", (("input", input),))
    mask = sole_mask(input, indices)
    if mask is not None and not _torch.tracing():
        return index_masked(input, mask)
    by_dim = indices_by_dim(input.shape, indices)
    if not by_dim:
        return _torch.stock(operator, args, kwargs)
    index_shape = tuple(next(iter(by_dim.values())).shape)
    source, output, moved = _plan(_torch.spec_of(input), tuple(by_dim), index_shape)
    remember(input)  # its gradient is written into zeros
    x = move(input, source)
    if not source.present:
        return output.absent(x)
    if not x.numel():
        check_indices(by_dim, source)
    if any(dim in source.sharded_dims and not x.shape[dim] for dim in by_dim):
        return _torch.wrap(x.new_zeros(output.local_shape), output.spec)
    local, mine = local_indices(by_dim, source)
    return _torch.wrap(zero_unowned(aten.index.Tensor(x, local), mine, moved.first).contiguous(), output.spec)
