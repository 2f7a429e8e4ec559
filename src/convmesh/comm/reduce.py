"""Putting small results of all ranks together: sums, extremes, and each rank's own part side by side.

Only what is left of a tensor after a local reduction comes here: numbers by channel, by row, or one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import inf, nan, prod

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from .. import _torch

FEW = 4096  # numbers, that may as well be sent several times over


def all_reduce(tensor: torch.Tensor, mesh: DeviceMesh, mesh_dims: Sequence[int], op: str = "sum") -> torch.Tensor:
    """`tensor` combined over all ranks along `mesh_dims`, on each of them; `op` is sum, max or min."""
    if all(mesh.size(mesh_dim) == 1 for mesh_dim in mesh_dims):
        return tensor
    if op == "sum" or not tensor.is_floating_point():
        return start_reducing(tensor, mesh, mesh_dims, op)()
    # Backends lose a NaN when they compare it, and torch's extremes do not. So either torch compares what all ranks
    # have, or it is said apart.
    ranks = prod(mesh.size(mesh_dim) for mesh_dim in mesh_dims)
    if ranks == 2 or tensor.numel() * ranks <= FEW:
        parts = side_by_side(tensor, mesh, tuple(mesh_dims))
        return parts.amin(0) if op == "min" else parts.amax(0)
    lost = inf if op == "min" else -inf
    missing = tensor.isnan()
    flags = missing.to(tensor.dtype) * (-1 if op == "min" else 1)
    both = torch.stack([tensor.masked_fill(missing, lost), flags])
    value, flag = start_reducing(both, mesh, mesh_dims, op)().unbind()
    return value.masked_fill(flag != 0, nan)


def start_reducing(
    tensor: torch.Tensor, mesh: DeviceMesh, mesh_dims: Sequence[int], op: str = "sum", in_place: bool = False
) -> Callable[[], torch.Tensor]:
    """Begin to combine `tensor`, which may be lost if it is `in_place`, over all ranks along `mesh_dims`; returns what
    waits for the result."""
    groups = groups_along(mesh, mesh_dims)
    if not groups:
        return lambda: tensor
    under_way = _torch.all_reduce(tensor.contiguous(), op, groups[0], in_place)

    def finish() -> torch.Tensor:
        result = _torch.wait(under_way)
        for group in groups[1:]:
            result = _torch.wait(_torch.all_reduce(result, op, group))
        return result

    return finish


def groups_along(mesh: DeviceMesh, mesh_dims: Sequence[int]) -> list[dist.ProcessGroup]:
    """The groups over which to reduce, one after the other: one for all of the mesh if it is the whole world.

    A group for other sets of mesh dimensions would have to be made first, by ranks that may not all be here.
    """
    mesh_dims = [mesh_dim for mesh_dim in mesh_dims if mesh.size(mesh_dim) > 1]
    world = dist.group.WORLD
    if len(mesh_dims) > 1 and world is not None and mesh.size() == world.size():
        every = all(mesh.size(mesh_dim) == 1 for mesh_dim in range(mesh.ndim) if mesh_dim not in mesh_dims)
        if every:
            return [world]
    return [mesh.get_group(mesh_dim) for mesh_dim in mesh_dims]


def side_by_side(tensor: torch.Tensor, mesh: DeviceMesh, mesh_dims: tuple[int, ...]) -> torch.Tensor:
    """What each rank along `mesh_dims` has, stacked in the order of these ranks, the first mesh dimension outermost.

    Every rank fills its own place among zeros, and the sum of all is exact. So it is one all-reduce of few numbers.
    """
    sizes = [mesh.size(mesh_dim) for mesh_dim in mesh_dims]
    here = 0
    for mesh_dim, size in zip(mesh_dims, sizes, strict=True):
        here = here * size + mesh.get_local_rank(mesh_dim)
    places = tensor.new_zeros([prod(sizes), *tensor.shape])
    places[here] = tensor
    return start_reducing(places, mesh, mesh_dims, in_place=True)()
