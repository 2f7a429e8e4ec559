"""Shared by operators that read or write single positions along a sharded dimension, given by an index."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement, Replicate, Shard

from ...comm import owners
from ...sharding.implicit_replication import as_replicated
from ...sharding.layout import Layout
from ...sharding.sharding_table import Assignment, Row

aten = torch.ops.aten

# Rows in which the indexed dimension is sharded: the index is replicated and each rank uses the positions that it owns;
# or the index is sharded, and values are fetched from the owners of the positions, or sent to them.
OWNED, FETCH, SEND = "owned positions", "fetch by index", "send by index"


def mixes_0d(*operands: Any) -> bool:
    """Whether 0-d tensors are mixed with 1-d ones: torch treats them as having one element."""
    return {operand.ndim for operand in operands if isinstance(operand, Layout)} == {0, 1}


def at_least_1d(*values: Any) -> list[Any]:
    """Return all arguments, with 0-d tensors as 1-d tensors of one element."""
    are_0d = (isinstance(value, torch.Tensor) and not value.dim() for value in values)
    return [aten.unsqueeze.default(value, 0) if is_0d else value for value, is_0d in zip(values, are_0d, strict=True)]


def with_index(input: Any, dim: int, index: Any, *rest: Any) -> tuple[Any, ...]:
    """Make a plain index a replicated DTensor: it is a constant, the same on every rank."""
    plain = isinstance(input, DTensor) and not isinstance(index, DTensor)
    return input, dim, as_replicated(index, input.device_mesh) if plain else index, *rest


def owner_and_offset(places: torch.Tensor, index: Layout, full: Layout, dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    """For each position along `dim` in the local tensor of an index, return the rank that owns it and the offset there.

    Both are flat, in the order of the index's elements. The rank is counted among those that share `dim`; the offset is
    into that rank's flattened local tensor.
    """
    owner, starts, lengths = owners(places, full.shards(dim))
    offset = torch.zeros_like(places)
    for d in range(places.dim()):
        if d == dim:
            offset = offset * lengths + (places - starts)
        else:
            # All ranks that share `dim` own the same range of the other dimensions.
            own, shape = full.own(d), [1] * places.dim()
            shape[d] = places.shape[d]
            first = index.own(d).start - own.start
            offset = offset * len(own) + torch.arange(first, first + shape[d], device=places.device).view(shape)
    return owner.flatten(), offset.flatten()


def leaves_ranks_empty(layout: Layout, placements: tuple[Placement, ...]) -> bool:
    """Whether a tensor would be redistributed to a dimension of which half of the ranks or more have nothing."""
    moved = layout.placed(placements)
    return any(
        before != after and not isinstance(before, Replicate) and moved.mostly_empty(mesh_dim)
        for mesh_dim, (before, after) in enumerate(zip(layout.placements, placements, strict=True))
    )


def is_routable(assignment: Assignment, routed: str) -> bool:
    """Whether every routed position is in a local tensor: its owner has the index's range of all other dimensions.

    `routed` is the name of the rows that route indices. Nor may the indexed dimension be used in two of the ways
    `OWNED`, `FETCH` and `SEND` at once.
    """
    kinds = {row.name for row in assignment if row.name in (OWNED, FETCH, SEND)}
    routed_dims = {row.inputs[1] for row in assignment if row.name == routed}
    return len(kinds) < 2 and not any(
        row.inputs[0] in routed_dims for row in assignment if isinstance(row.inputs[0], Shard) and row.name not in kinds
    )


def replication_price(row: Row, mesh_dim: int, layouts: Sequence[Layout]) -> float:
    """The storage, in elements, that sharded tensors take if a row replicates them."""
    return sum(
        prod(layout.shape)
        for layout, wanted in zip(layouts, row.inputs, strict=True)
        if isinstance(layout.placements[mesh_dim], Shard)
        and isinstance(wanted, Replicate)
        and layout.mesh.size(mesh_dim) > 1
    )
