"""Sample sort of a sharded row: every rank sorts its shard, an all-to-all splits by value, another one by position.

Samples decide which values go to which rank. They only balance the work: the result is exact.
"""

from __future__ import annotations

import torch

from ...comm import all_gather_stacked, owners, rank_line, route_rows
from ...sharding.layout import Layout

SAMPLES = 64  # per rank


def sample_sort(
    values: torch.Tensor, layout: Layout, dim: int, descending: bool
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Return the local tensor of the sorted row, and the positions that its values had. The sort is stable."""
    mesh, mesh_dims = layout.mesh, layout.sharded_dims[dim]
    ranked, order = values.sort(descending=descending, stable=True)
    route = route_rows(_destination_rank(ranked, layout, dim, descending), mesh, mesh_dims)
    # They arrive in the order of the ranks, so equal values keep their order.
    received, places = route.send(ranked), route.send(order + layout.own(dim).start)
    received, order = received.sort(descending=descending, stable=True)
    places = places[order]
    counts = all_gather_stacked(torch.tensor(received.numel(), device=received.device), mesh, mesh_dims).tolist()
    first = sum(counts[: rank_line(mesh, mesh_dims).rank])
    position = torch.arange(first, first + received.numel(), device=received.device)
    back = route_rows(owners(position, layout.shards(dim))[0], mesh, mesh_dims)
    return back.send(received), back.send(places)


def _destination_rank(ranked: torch.Tensor, layout: Layout, dim: int, descending: bool) -> torch.Tensor:
    """Return the rank that each value goes to; values ascend (or descend) with the ranks. NaN is the greatest."""
    mesh, mesh_dims = layout.mesh, layout.sharded_dims[dim]
    size = rank_line(mesh, mesh_dims).size
    samples = ranked.new_zeros(SAMPLES)
    if ranked.numel():
        samples = ranked[torch.linspace(0, ranked.numel() - 1, SAMPLES, device=ranked.device).long()]
    has_values = torch.tensor(int(ranked.numel() > 0), device=ranked.device)
    all_samples = all_gather_stacked(samples, mesh, mesh_dims)
    all_samples = all_samples[all_gather_stacked(has_values, mesh, mesh_dims).bool()].flatten()
    all_samples = all_samples[all_samples == all_samples].sort()[0]  # without NaN
    if not all_samples.numel():
        return torch.zeros(ranked.numel(), dtype=torch.int64, device=ranked.device)
    limits = all_samples[torch.arange(1, size, device=ranked.device) * all_samples.numel() // size]
    bucket = torch.bucketize(ranked, limits, right=True)
    if ranked.is_floating_point():
        bucket = bucket.masked_fill(ranked.isnan(), size - 1)
    return size - 1 - bucket if descending else bucket
