"""Lines of ranks: the process group over which one tensor dimension is cut."""

from __future__ import annotations

from dataclasses import dataclass
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from .. import _torch


@dataclass(frozen=True)
class Line:
    """A process group, and where this rank stands in it. The ranks are in the order of what they own."""

    group: dist.ProcessGroup
    rank: int
    size: int


# Groups over several mesh dimensions, kept by the group of the first of them: they go when it is destroyed.
_joined: WeakKeyDictionary[dist.ProcessGroup, dict[tuple[int, ...], dist.ProcessGroup]] = WeakKeyDictionary()


def line(mesh: DeviceMesh, mesh_dims: tuple[int, ...]) -> Line:
    """The ranks that differ from this one only along `mesh_dims`, the first of these outermost."""
    rank, size = 0, 1
    for dim in mesh_dims:
        rank = rank * mesh.size(dim) + mesh.get_local_rank(dim)
        size *= mesh.size(dim)
    first = mesh.get_group(mesh_dims[0])
    if len(mesh_dims) == 1:
        return Line(first, rank, size)
    known = _joined.setdefault(first, {})
    if mesh_dims not in known:
        with _torch.outside_tracing():
            known[mesh_dims] = dist.new_group(_members(mesh, mesh_dims), use_local_synchronization=True)
    return Line(known[mesh_dims], rank, size)


def _members(mesh: DeviceMesh, mesh_dims: tuple[int, ...]) -> list[int]:
    """Global ranks of the line, in its order."""
    coordinate = mesh.get_coordinate()
    assert coordinate is not None, "a rank outside of the mesh has no part in its exchanges"
    here: list[int | slice] = [slice(None) if dim in mesh_dims else at for dim, at in enumerate(coordinate)]
    return [int(rank) for rank in mesh.mesh[tuple(here)].flatten().tolist()]
