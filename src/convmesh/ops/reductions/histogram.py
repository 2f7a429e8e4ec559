"""Counting values: each rank counts its own, and the counts are all-reduced."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor

from ... import _torch
from ...comm import all_reduce
from ...sharding.call import Call, Reported
from ...sharding.errors import Unfit
from ...sharding.implicit_replication import as_replicated
from ...sharding.layout import Layout
from ...sharding.plan_rule import plan_rule
from ...sharding.registry import Behaviour
from .._core.index_bounds import can_route

aten = torch.ops.aten

COUNT = Behaviour(
    "all dimensions of the input; counts are replicated",
    "all-reduce of the counts, and of the least and greatest values if no range is given",
    "compiled code if no range is given, because it does not know values",
)


@plan_rule(aten.bincount.default, behaviour=COUNT, asks=can_route)
def bincount(operator: _torch.Operator, input: Layout, weights: Layout | None, minlength: int, known: bool) -> Call:
    if input.ndim != 1 or (weights is not None and weights.shape != input.shape) or not known:
        raise Unfit("it needs a 1-d input, weights of the same shape, and values, which compiled code does not know",
                    "flatten both, and call it outside of torch.compile")  # fmt: skip
    source = input.without_partial()
    mesh_dims = source.sharded_over()
    dtype = torch.int64 if weights is None else torch.double if weights.dtype != torch.float32 else torch.float32
    row = source.replicated().new((minlength,), dtype=dtype)

    def run(local: torch.Tensor, weights: torch.Tensor | None, _: int) -> tuple[torch.Tensor, Layout]:
        least, most = (int(local.min()), int(local.max())) if local.numel() else (0, -1)
        ends = torch.tensor([-least, most], device=local.device)
        lowest, highest = all_reduce(ends, source.mesh, mesh_dims, "max").tolist()
        if lowest > 0:
            raise RuntimeError("bincount: expected integers that are not negative")
        counted = all_reduce(operator(local, weights, max(minlength, highest + 1)), source.mesh, mesh_dims)
        return counted, row.new(counted.shape, dtype=counted.dtype)

    return Call((source, weights and weights.placed(source.placements)), Reported(row), run)


@plan_rule(aten.histc.default, behaviour=COUNT, asks=can_route)
def histc(operator: _torch.Operator, input: Layout, bins: int, low: float, high: float, known: bool) -> Call:
    """Count between given bounds, or between the minimum and the maximum over all ranks."""
    if low == high and not known:
        raise Unfit("compiled code does not know the least and the greatest value", "give min and max")
    source = input.without_partial()

    def run(local: torch.Tensor, *_: Any) -> torch.Tensor:
        between = _min_max(local, source) if low == high and 0 not in source.shape else (low, high)
        counted = operator(local, bins, *between) if local.numel() else local.new_zeros(bins)
        return all_reduce(counted, source.mesh, source.sharded_over())

    return Call((source,), source.replicated().new((bins,)), run)


def _min_max(local: torch.Tensor, layout: Layout) -> tuple[float, float]:
    """Return the minimum and the maximum over all ranks."""
    far = torch.finfo(local.dtype).max
    ends = torch.stack([-local.min(), local.max()]) if local.numel() else local.new_full((2,), -far)
    least, most = all_reduce(ends, layout.mesh, layout.sharded_over(), "max").tolist()
    return -least, most


def _bins_everywhere(input: Any, bins: Any, *rest: Any) -> tuple[Any, ...]:
    """Make plain bin edges a replicated DTensor."""
    plain = isinstance(bins, torch.Tensor) and not isinstance(bins, DTensor)
    return input, as_replicated(bins, input.device_mesh) if plain else bins, *rest


@plan_rule(
    aten.histogram.bin_ct, aten.histogram.bins_tensor, behaviour=COUNT, asks=can_route, completes=_bins_everywhere
)
def histogram(operator: _torch.Operator, input: Layout, bins: Any, *how: Any) -> Call:
    """Plan counts, or sums of weights, in bins whose edges every rank knows. A density is normalized over all ranks."""
    *within, weight, density, known = how
    by_edges = isinstance(bins, Layout)
    if not by_edges and within == [None] and not known:
        raise Unfit("compiled code does not know the least and the greatest value", "give a range")
    source = input.without_partial()
    edges = source.replicated().new((bins.shape[0] if by_edges else bins + 1,))
    operands = [source, bins.replicated()] if by_edges else [source]
    counts = edges.new((edges.shape[0] - 1,))

    def run(local: torch.Tensor, bins: Any, *rest: Any) -> tuple[torch.Tensor, torch.Tensor]:
        weights, between = rest[-2], {}
        if not by_edges:
            between = {"range": _min_max(local, source) if rest[0] is None and 0 not in source.shape else rest[0]}
        counted, edges = operator(local, bins, **between, weight=weights)
        counted = all_reduce(counted, source.mesh, source.sharded_over())
        return counted / edges.diff() / counted.sum() if density else counted, edges

    return Call((*operands, weight and weight.placed(source.placements)), (counts, edges), run)
