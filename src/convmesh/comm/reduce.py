"""Sums and extremes over the ranks of mesh dimensions."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf, nan

import torch
from torch.distributed.device_mesh import DeviceMesh

from .. import _torch


def all_reduce(tensor: torch.Tensor, mesh: DeviceMesh, mesh_dims: Sequence[int], op: str = "sum") -> torch.Tensor:
    """`tensor` combined over all ranks along `mesh_dims`, on each of them; `op` is sum, max or min."""
    mesh_dims = [mesh_dim for mesh_dim in mesh_dims if mesh.size(mesh_dim) > 1]
    if not mesh_dims:
        return tensor
    if op == "sum" or not tensor.is_floating_point():
        return _reduce(tensor, mesh, mesh_dims, op)
    # Backends lose a NaN when they compare it, and torch's extremes do not: so it is said apart.
    lost = inf if op == "min" else -inf
    missing = tensor.isnan()
    flags = missing.to(tensor.dtype) * (-1 if op == "min" else 1)
    value, flag = _reduce(torch.stack([tensor.masked_fill(missing, lost), flags]), mesh, mesh_dims, op).unbind()
    return value.masked_fill(flag != 0, nan)


def _reduce(tensor: torch.Tensor, mesh: DeviceMesh, mesh_dims: Sequence[int], op: str) -> torch.Tensor:
    for mesh_dim in mesh_dims:
        tensor = _torch.wait(_torch.all_reduce(tensor, op, mesh.get_group(mesh_dim)))
    return tensor
