"""Placements of tensors in the forward pass, kept for their gradients: torch asks for some of those by shape only.

Any placement of a gradient is correct. That of its tensor saves memory, and a later redistribution. A replicated tensor
may be used by one rank alone, to log it for example, which would then choose other placements than the other ranks: it
is only remembered if it requires a gradient.
"""

from __future__ import annotations

from collections.abc import Hashable

from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement, Replicate, Shard

from .. import _torch

Placements = tuple[Placement, ...]

LARGEST = 4096


def key_of(known: Hashable) -> Hashable:
    """Return a hashable key: while tracing, symbols are replaced by their names."""
    try:
        hash(known)
    except TypeError:
        key: Hashable = _torch.named(known)
        return key
    return known


class Hints:
    """Placements under keys known in forward and backward. The last forward pass wins."""

    def __init__(self) -> None:
        self._seen: dict[Hashable, Placements] = {}

    def remember(self, key: Hashable, placements: Placements) -> None:
        """Store placements in the forward pass. In backward this does nothing: gradients do not set placements."""
        if _torch.in_backward():
            return
        if len(self._seen) >= LARGEST:
            self._seen.clear()
        self._seen[key_of(key)] = placements

    def recall(self, key: Hashable) -> Placements | None:
        """Return the placements stored under `key` if called in backward, or None."""
        return self._seen.get(key_of(key)) if _torch.in_backward() else None


by_shape = Hints()


def hint_of(spec: _torch.Spec) -> tuple[Hashable, Placements]:
    """Return (key, placements) to store `by_shape` for a tensor whose gradient is made from zeros of its shape."""
    placements = tuple(p if isinstance(p, Shard) else Replicate() for p in spec.placements)
    return (spec.mesh, tuple(spec.shape)), placements


def counts(tensor: DTensor) -> bool:
    """Whether all ranks use the tensor in this call: it is sharded, or requires a gradient."""
    return tensor.requires_grad or any(isinstance(placement, Shard) for placement in tensor.placements)


def remember(tensor: DTensor) -> None:
    """Store the placements of such a tensor in the forward pass."""
    if counts(tensor):
        by_shape.remember(*hint_of(_torch.spec_of(tensor)))


def placements_of(mesh: DeviceMesh, shape: tuple[int, ...]) -> Placements | None:
    """Return, in backward, the placements of the last tensor of this shape, or None."""
    return by_shape.recall((mesh, shape))
