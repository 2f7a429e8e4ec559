"""Rank lines: the ranks over which one tensor dimension is sharded.

A dimension sharded over several mesh dimensions has no process group of its own. Its messages hop along one mesh
dimension after the other, in the groups that the mesh has: creating a group would need ranks that may not take part in
the call.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import prod

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh


@dataclass(frozen=True)
class RankLine:
    """The ranks that differ from this one only along some mesh dimensions, numbered in the order of their shards."""

    groups: tuple[dist.ProcessGroup, ...]
    sizes: tuple[int, ...]
    place: tuple[int, ...]  # this rank's coordinates along these mesh dimensions

    @cached_property
    def size(self) -> int:
        return prod(self.sizes)

    @cached_property
    def rank(self) -> int:
        rank = 0
        for size, at in zip(self.sizes, self.place, strict=True):
            rank = rank * size + at
        return rank


def rank_line(mesh: DeviceMesh, mesh_dims: tuple[int, ...]) -> RankLine:
    """Return the line of ranks along `mesh_dims`, the first of these outermost."""
    return RankLine(
        tuple(mesh.get_group(dim) for dim in mesh_dims),
        tuple(mesh.size(dim) for dim in mesh_dims),
        tuple(mesh.get_local_rank(dim) for dim in mesh_dims),
    )
