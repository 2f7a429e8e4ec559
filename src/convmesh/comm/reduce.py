"""Sums and extremes over the ranks of mesh dimensions."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.distributed.device_mesh import DeviceMesh

from .. import _torch


def all_reduce(tensor: torch.Tensor, mesh: DeviceMesh, mesh_dims: Sequence[int], op: str = "sum") -> torch.Tensor:
    """`tensor` combined over all ranks along `mesh_dims`, on each of them; `op` is sum, max or min."""
    for mesh_dim in mesh_dims:
        if mesh.size(mesh_dim) > 1:
            tensor = _torch.wait(_torch.all_reduce(tensor, op, mesh.get_group(mesh_dim)))
    return tensor
