"""One index of a dimension: `select` and its gradient.

The owner broadcasts the index, so that the result is replicated over the mesh dimensions that shard the dimension. A
Partial(sum) would send nothing at first, but each of its users would reduce it again, and it loses what a sum cannot
represent (bools, the sign of zero).
"""

from __future__ import annotations

from dataclasses import replace
from functools import reduce
from typing import Any

import torch
from torch.distributed.tensor.placement_types import Partial, Placement, Replicate, Shard

from ... import _torch
from ...comm import broadcast_from_owner, fetch, rank_line
from ...geometry import Interval
from ...sharding.call import Call
from ...sharding.errors import Unfit
from ...sharding.gradient_placements import Placements, placements_of
from ...sharding.layout import Layout, reduced
from ...sharding.local_views import local_views
from ...sharding.plan_rule import Made, plan_rule
from ...sharding.registry import Behaviour
from .slice_split import index_copy

aten = torch.ops.aten

SQUEEZED = "nothing; a squeezed dimension that is sharded is broadcast by its owner"
SELECT = Behaviour("all other dimensions", "nothing; the index of a sharded dimension is broadcast by its owner")


def _local_select(operator: _torch.Operator, input: Layout, dim: int, index: int) -> Layout | None:
    """Return the layout of one index of a dimension that is not sharded; None otherwise, and where torch raises."""
    dim %= max(1, input.ndim)
    if not input.shape or dim in input.sharded_dims or not -input.shape[dim] <= index < input.shape[dim]:
        return None
    return replace(input.without((dim,)), stride=(*input.stride[:dim], *input.stride[dim + 1 :]))


@plan_rule(aten.select.int, behaviour=SELECT, foreign=True, remembers=True, quick=local_views(_local_select))
def select(operator: _torch.Operator, input: Layout, dim: int, index: int) -> Call | None:
    dim %= max(1, input.ndim)
    if dim not in input.sharded_dims:
        output = _local_select(operator, input, dim, index)
        return None if output is None else Call((input,), output, operator, view=True)
    size = input.shape[dim]
    if not -size <= index < size:
        raise Unfit(f"dimension {dim} has no index {index}", "give an index that it has")
    source, at = input.without_partial("sum"), index % size
    mesh_dims, selected = source.sharded_over((dim,)), Interval(at, at + 1)
    schedule, own = None, Interval(0, 0)
    if source.present and mesh_dims:
        schedule, own = broadcast_from_owner(rank_line(source.mesh, mesh_dims), size, at), source.own(dim)

    def run(x: torch.Tensor, *_: int) -> torch.Tensor:
        local = x.narrow(dim, at, 1) if schedule is None else fetch(schedule, x, (dim,), (own,), (selected,))
        return _torch.tie(local.squeeze(dim).clone(memory_format=torch.contiguous_format), x)

    return Call((source,), source.without((dim,)), run, copies=[index_copy(dim, index)])


def _remembered_placements(gradient: _torch.Spec, sizes: tuple[int, ...], *_: int) -> Placements | None:
    """The placements that the selected tensor had, if they are known."""
    return placements_of(gradient.mesh, sizes)


@plan_rule(
    aten.select_backward.default, asks=_remembered_placements,
    behaviour=Behaviour("all dimensions, Partial(sum)",
                        "nothing; all-reduce of a Partial gradient where the selected dimension was sharded"),
)  # fmt: skip
def select_backward(
    operator: _torch.Operator, gradient: Layout, shape: tuple[int, ...], dim: int, index: int,
    remembered: Placements | None,
) -> Call:  # fmt: skip
    """Every rank has the gradient of the one index; only the owner of the index writes it."""
    dim %= len(shape)
    if gradient.shape != (*shape[:dim], *shape[dim + 1 :]) or not -shape[dim] <= index < shape[dim]:
        raise Unfit(f"not the gradient of an index of a tensor of shape {shape}",
                    "give a gradient of the selected shape")  # fmt: skip
    was_sharded = [p == Shard(dim) for p in remembered] if remembered else [False] * gradient.mesh.ndim
    # A Partial would have the size of the full tensor on every rank: the one index is reduced instead.
    source = gradient.placed(
        Replicate() if sharded and isinstance(p, Partial) else reduced(p, "sum")
        for p, sharded in zip(gradient.placements, was_sharded, strict=True)
    )

    def grown_placement(placement: Placement, sharded: bool) -> Placement:
        if isinstance(placement, Shard):
            return Shard(placement.dim + (placement.dim >= dim))
        return Shard(dim) if sharded and isinstance(placement, Replicate) else placement

    result = gradient.new(shape, map(grown_placement, source.placements, was_sharded))
    at, own = index % shape[dim], result.own(dim) if result.present else Interval(0, 0)

    def run(local: torch.Tensor, *_: Any) -> torch.Tensor:
        zeros = local.new_zeros(result.local_shape)
        if at in own:
            zeros.select(dim, at - own.start).copy_(local)
        return _torch.tie(zeros, local)

    return Call((source,), result, run)


@plan_rule(
    aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims, foreign=True,
    behaviour=Behaviour("all other dimensions", SQUEEZED),
)  # fmt: skip
def squeeze(operator: _torch.Operator, input: Layout, *which: Any) -> Made | None:
    """Select the only index of a sharded dimension; torch's DTensor does the rest."""
    named = range(input.ndim) if not which else [which[0]] if isinstance(which[0], int) else which[0]
    dims = {dim % max(1, input.ndim) for dim in named}
    single = sorted((dim for dim in dims if dim < input.ndim and input.shape[dim] == 1), reverse=True)
    # DTensor does not squeeze a tensor that is sharded along a dimension of size 0 either.
    if input.sharded_dims.keys().isdisjoint(single) and 0 not in input.shape:
        return None
    if not single:
        return lambda input, *_: aten.view.default(input, input.shape)
    return lambda input, *_: reduce(lambda full, dim: aten.select.int(full, dim, 0), single, input)
