"""Counting values: each rank counts its own, and the counts are added up."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor

from ... import _torch
from ...comm import all_reduce
from ...sharding.errors import refuse
from ...sharding.implicit_replication import the_same_everywhere
from ...sharding.layout import Layout
from ...sharding.redistribute import check_placed, move, move_beside
from ...sharding.registry import Behaviour, rule
from ..indexing.index_select import local_index

aten = torch.ops.aten

COUNT = Behaviour(
                  "the counted values", "all-reduce of the counts, and of the greatest value",
                  "compiled code, in which the greatest value is not known")  # fmt: skip


@rule(aten.bincount.default, behaviour=COUNT)
def bincount(operator: _torch.Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> DTensor:
    input, weights, minlength = _torch.arguments(operator, args, kwargs)
    check_placed("bincount", (("input", input), ("weights", weights)))
    if input.dim() != 1 or (weights is not None and weights.shape != input.shape) or _torch.tracing():
        raise refuse("bincount", "it counts rows, and in compiled code not even those: their values are not known",
                     (("input", input), ("weights", weights)),
                     "flatten both, and call it outside of torch.compile")  # fmt: skip
    layout = Layout.of(_torch.spec_of(input)).without_partial()
    local = move(input, layout)
    dtype = torch.int64 if weights is None else torch.double if weights.dtype != torch.float32 else torch.float32
    counted = local.new_empty(0, dtype=dtype)
    shape: tuple[int, ...] = (minlength,)
    if layout.present:
        mesh_dims = layout.sharded_over([0])
        least, most = (int(local.min()), int(local.max())) if local.numel() else (0, -1)
        ends = torch.tensor([-least, most], device=local.device)
        lowest, highest = all_reduce(ends, layout.mesh, mesh_dims, "max").tolist()
        if lowest > 0:
            raise RuntimeError("bincount: expected integers that are not negative")
        given = None if weights is None else move_beside(weights, layout)
        counted = aten.bincount.default(local, given, max(minlength, highest + 1))
        counted = all_reduce(counted, layout.mesh, mesh_dims)
        shape = tuple(counted.shape)
    return _torch.wrap(counted, layout.replicated().new(shape, dtype=counted.dtype).spec)


@rule(aten.histc.default, behaviour=COUNT)
def histc(operator: _torch.Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> DTensor:
    """Between given bounds, or between the least and the greatest value of all ranks."""
    input, bins, low, high = _torch.arguments(operator, args, kwargs)
    check_placed("histc", (("input", input),))
    if low == high and _torch.tracing():
        raise refuse("histc", "compiled code does not know the least and the greatest value", (("input", input),),
                     "give min and max")  # fmt: skip
    layout = Layout.of(_torch.spec_of(input)).without_partial()
    local = move(input, layout)
    output = layout.replicated().new((bins,))
    if not layout.present:
        return output.absent(local)
    mesh_dims = layout.sharded_over()
    if low == high and input.numel():
        low, high = _ends(local, layout, mesh_dims)
    counted = aten.histc.default(local, bins, low, high) if local.numel() else local.new_zeros(bins)
    return _torch.wrap(all_reduce(counted, layout.mesh, mesh_dims), output.spec)


def _ends(local: torch.Tensor, layout: Layout, mesh_dims: tuple[int, ...]) -> tuple[float, float]:
    """The least and the greatest value of all ranks."""
    far = torch.finfo(local.dtype).max
    ends = torch.stack([-local.min(), local.max()]) if local.numel() else local.new_full((2,), -far)
    least, most = all_reduce(ends, layout.mesh, mesh_dims, "max").tolist()
    return -least, most


@rule(aten.histogram.bin_ct, aten.histogram.bins_tensor, behaviour=COUNT)
def histogram(operator: _torch.Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[DTensor, DTensor]:
    """Counts, or sums of weights, in bins whose edges every rank knows; of a density, all ranks' values are parts."""
    input, bins, *given, weight, density = _torch.arguments(operator, args, kwargs)
    check_placed("histogram", (("input", input), ("weight", weight)))
    by_edges = isinstance(bins, torch.Tensor)
    within = None if by_edges else given[0]
    if not by_edges and within is None and _torch.tracing():
        raise refuse("histogram", "compiled code does not know the least and the greatest value", (("input", input),),
                     "give a range")  # fmt: skip
    layout = Layout.of(_torch.spec_of(input)).without_partial()
    local, weights = move(input, layout), None if weight is None else move_beside(weight, layout)
    if not layout.present:
        raise refuse("histogram", "this rank is not in the mesh", (("input", input),), "call it on the mesh's ranks")
    mesh_dims = layout.sharded_over()
    if by_edges:
        counted, edges = operator(local, local_index(bins), weight=weights)
    else:
        if within is None and input.numel():
            within = _ends(local, layout, mesh_dims)
        counted, edges = operator(local, bins, range=within, weight=weights)
    counted = all_reduce(counted, layout.mesh, mesh_dims)
    counted = counted / edges.diff() / counted.sum() if density else counted
    return the_same_everywhere(counted, layout.mesh), the_same_everywhere(edges, layout.mesh)
