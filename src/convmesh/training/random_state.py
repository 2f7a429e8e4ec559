"""Sharing the random state of the first rank."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from .. import _torch


def share_random_state(mesh: DeviceMesh) -> None:
    """Give all ranks of the mesh the first rank's random state, of the CPU and of the mesh's device.

    Random operators draw the numbers of one device, and each rank keeps its shard: so all ranks must draw the same.
    """
    if mesh.get_coordinate() is None or not _torch.has_values(mesh):
        return
    torch.set_rng_state(of_first_rank(torch.get_rng_state(), mesh))
    if mesh.device_type != "cpu":
        device = torch.get_device_module(mesh.device_type)
        device.set_rng_state(of_first_rank(device.get_rng_state(), mesh))


def of_first_rank(state: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    """Return the first rank's values of a CPU tensor, which has the same shape and dtype on all ranks of the mesh."""
    state = state.to(mesh.device_type, copy=True)
    for mesh_dim in range(mesh.ndim):
        group = mesh.get_group(mesh_dim)
        dist.broadcast(state, dist.get_global_rank(group, 0), group=group)
    return state.cpu()
