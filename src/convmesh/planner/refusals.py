"""Operators that are refused on a mesh: a plan notes them and goes on as if their tensors were replicated."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate
from torch.utils._pytree import tree_map_only

from .. import _torch
from ..sharding.errors import ShardingError
from .trace import Refusal


def refusal(error: ShardingError, layer: str, line: str | None) -> Refusal:
    """Split an error into what is wrong and what would help."""
    lines = [line.strip() for line in str(error).splitlines()]
    remedies = [line.removeprefix("remedy: ") for line in lines if line.startswith("remedy: ")]
    return Refusal(layer, line or error.where, lines[0], "; ".join(remedies))


def replicated(func: Any, args: Any, kwargs: Any, error: ShardingError) -> Any:
    """Return what the operator would on one device, replicated. An error that has nothing to do with sharding, such
    as channels that do not fit, is raised as it is, and so is that of an operator which writes into its arguments."""
    meshes = [one.device_mesh for one in _dtensors((args, kwargs))]
    if not meshes or func._schema.is_mutable or _torch.has_values(meshes[0]):
        raise error
    try:
        full = tree_map_only(DTensor, _whole, (args, kwargs))
        result = func(*full[0], **full[1])
    except Exception:
        raise error from None
    return tree_map_only(torch.Tensor, lambda one: _everywhere(one, meshes[0]), result)


def _dtensors(values: Any) -> list[DTensor]:
    found: list[DTensor] = []
    tree_map_only(DTensor, found.append, values)
    return found


def _whole(tensor: DTensor) -> torch.Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=_torch.DEVICE)


def _everywhere(tensor: torch.Tensor, mesh: Any) -> DTensor:
    return DTensor.from_local(tensor, mesh, [Replicate()] * mesh.ndim, run_check=False)
