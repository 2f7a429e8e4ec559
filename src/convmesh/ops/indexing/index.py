"""Indexing with tensors of indices, of one dimension or several, and the gradient that torch makes of it.

As in `index_select` every rank takes what it owns, and contributes zeros for the others. The indices are the same on
every rank; a mask beside other indices stands for the places where it is true. One alone has a way of its own.
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
from .._core.index_bounds import check_within
from .index_select import INDEX, local_index, owned
from .masked_select import index_masked, refuse_compiled

aten = torch.ops.aten

Picks = dict[int, torch.Tensor]
"""The indexed dimensions, and which of their indices: all of one shape, counted from the start."""


def picks_of(shape: Sequence[int], indices: Sequence[torch.Tensor | None]) -> Picks:
    found: Picks = {}
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
            found[dim] = _from_the_start(places.long(), shape[dim])
            dim += 1
    return dict(zip(found, torch.broadcast_tensors(*found.values()), strict=True))


def _from_the_start(places: torch.Tensor, size: int) -> torch.Tensor:
    """Those that are counted from the end, as from the start. One beyond the start is beyond the end then: an operator
    would count a negative one from the end once more."""
    return torch.where(places < 0, torch.where(places < -size, size, places + size), places)


@dataclass(frozen=True)
class Moved:
    """Where the dimensions of an indexed tensor go: the indexed ones become those of the indices."""

    first: int  # the first dimension of the indices in the result
    shape: tuple[int, ...]
    others: dict[int, int]  # the dimensions that are not indexed, and their numbers in the result


def moved_by(shape: tuple[int, ...], dims: tuple[int, ...], picked: tuple[int, ...]) -> Moved:
    adjacent = dims == tuple(range(dims[0], dims[0] + len(dims)))
    kept = [dim for dim in range(len(shape)) if dim not in dims]
    first = dims[0] if adjacent else 0
    others = {dim: place + (len(picked) if place >= first else 0) for place, dim in enumerate(kept)}
    sizes = [shape[dim] for dim in kept]
    return Moved(first, (*sizes[:first], *picked, *sizes[first:]), others)


@planned
def _plan(spec: _torch.Spec, dims: tuple[int, ...], picked: tuple[int, ...]) -> tuple[Layout, Layout, Moved]:
    layout = Layout.of(spec)
    moved = moved_by(layout.shape, dims, picked)
    source = layout.without_partial("sum")
    placements: list[Placement] = list(source.placements)
    for mesh_dim, p in enumerate(placements):
        if isinstance(p, Shard):
            placements[mesh_dim] = P if p.dim in dims else Shard(moved.others[p.dim])
    return source, layout.new(moved.shape, tuple(placements)), moved


def here_of(picks: Picks, layout: Layout) -> tuple[list[torch.Tensor | None], torch.Tensor | None]:
    """The indices in the local tensor, and which of them it has (None: all of them)."""
    local: list[torch.Tensor | None] = [picks.get(dim) for dim in range(len(layout.shape))]
    mine: torch.Tensor | None = None
    for dim in picks:
        if dim in layout.sharded_dims:
            local[dim], some = owned(picks[dim], layout.own(dim), layout.shape[dim])
            mine = some if mine is None else mine & some
    return local, mine


def check_picks(picks: Picks, layout: Layout) -> None:
    """For a rank that has nothing of an indexed tensor, so that no operator looks at them."""
    for dim, places in picks.items():
        check_within(places, layout.shape[dim])


def without_others(values: torch.Tensor, mine: torch.Tensor | None, first: int) -> torch.Tensor:
    """Zero where another rank has the index."""
    if mine is None:
        return values
    behind = values.dim() - first - mine.dim()
    return values.masked_fill(~mine.reshape((*mine.shape, *[1] * behind)), 0)


def sole_mask(input: Any, indices: Sequence[Any]) -> DTensor | None:
    """The mask of `input[mask]`, where only the first dimensions are masked and nothing else is indexed."""
    given = [index for index in indices if index is not None]
    alone = len(given) == 1 and indices[0] is given[0] and isinstance(given[0], DTensor)
    return given[0] if alone and given[0].dtype == torch.bool and given[0].dim() else None


@rule(aten.index.Tensor, behaviour=INDEX)
def index(operator: _torch.Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`x[:, :, indices]`, `x[rows, columns]`, `x[mask]`. How many places a mask names only its values say, so
    no plan is made of layouts alone."""
    input, indices = _torch.arguments(operator, args, kwargs)
    if not isinstance(input, DTensor) or input.dtype == torch.bool:  # which cannot be Partial(sum)
        return _torch.stock(operator, args, kwargs)
    check_placed("index", (("input", input),))
    mask = sole_mask(input, indices)
    if mask is not None and not _torch.tracing():
        return index_masked(input, mask)
    picks = picks_of(input.shape, indices)
    if not picks:
        return _torch.stock(operator, args, kwargs)
    picked = tuple(next(iter(picks.values())).shape)
    source, output, moved = _plan(_torch.spec_of(input), tuple(picks), picked)
    remember(input)  # its gradient is written into zeros
    x = move(input, source)
    if not source.present:
        return output.absent(x)
    if not x.numel():
        check_picks(picks, source)
    if any(dim in source.sharded_dims and not x.shape[dim] for dim in picks):
        return _torch.wrap(x.new_zeros(output.local_shape), output.spec)
    local, mine = here_of(picks, source)
    return _torch.wrap(without_others(aten.index.Tensor(x, local), mine, moved.first).contiguous(), output.spec)
