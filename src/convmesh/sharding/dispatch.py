"""What every rule begins and ends with: checking the tensors, moving them to where the plan has them, wrapping."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Shard

from .. import _torch
from ..comm import line, swap
from .errors import refuse
from .layout import Layout

Named = Sequence[tuple[str, Any]]


def check_placed(operator: str, tensors: Named) -> None:
    """All are DTensors on one mesh, cut in the plain order. Checked on every call: a plain tensor has no layout."""
    given = [(name, tensor) for name, tensor in tensors if tensor is not None]
    for name, tensor in given:
        if not isinstance(tensor, DTensor):
            raise refuse(
                operator, f"{name} is a plain torch.Tensor beside DTensors", tensors,
                f"make it a DTensor: distribute_tensor({name}, mesh, placements), replicated if it is whole",
            )  # fmt: skip
    mesh = given[0][1].device_mesh
    for name, tensor in given:
        if tensor.device_mesh != mesh:
            raise refuse(operator, f"{name} is on another mesh than {given[0][0]}", tensors,
                         "put all of them on one mesh, replicated where they are not sharded")  # fmt: skip
        spec = _torch.spec_of(tensor)
        if not _torch.plain_order(spec) or any(type(p).__name__ == "_StridedShard" for p in spec.placements):
            raise refuse(operator, f"{name} is cut in an order of mesh dimensions that is not the mesh's own", tensors,
                         f"redistribute {name} to plain Shard(dim) placements first")  # fmt: skip


def move(tensor: DTensor | None, target: Layout | None) -> Any:
    """This rank's part of `tensor` where the plan has it."""
    if tensor is None or target is None:
        return None
    local = _torch.local_of(tensor)
    if tensor.placements == target.placements:
        return local
    source = Layout.of(_torch.spec_of(tensor))
    for mesh_dim in range(source.mesh.ndim):
        if swaps(source, target, mesh_dim):
            before, after = source.placements[mesh_dim].dim, target.placements[mesh_dim].dim  # type: ignore[attr-defined]
            local = swap(local, before, source.shape[before], after, line(source.mesh, (mesh_dim,)))
            changed = (*source.placements[:mesh_dim], target.placements[mesh_dim], *source.placements[mesh_dim + 1 :])
            source = source.placed(changed)
    return local if source.placements == target.placements else _torch.redistribute(local, source.spec, target.spec)


def swaps(source: Layout, target: Layout, mesh_dim: int) -> bool:
    """Whether another dimension is to be cut over this mesh dimension, and no other mesh dimension cuts the two.

    DTensor gathers for it where the backend is gloo.
    """
    before, after = source.placements[mesh_dim], target.placements[mesh_dim]
    if type(before) is not Shard or type(after) is not Shard or before == after:
        return False
    alone = len(source.cuts[before.dim]) == 1 and after.dim not in source.cuts
    return alone and source.mesh.get_coordinate() is not None


def place(local: torch.Tensor | None, computed: Layout | None, wanted: Layout | None) -> DTensor | None:
    """The DTensor of a result that lies as `computed` says, moved to where it is `wanted`."""
    if local is None or computed is None or wanted is None:
        return None
    if computed.placements != wanted.placements:
        local = _torch.redistribute(local, computed.spec, wanted.spec)
    return _torch.wrap(local, wanted.spec)
