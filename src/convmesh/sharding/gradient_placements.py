"""Where tensors were in the forward pass, for gradients: torch asks for some of these by sizes only.

Any placement of a gradient is exact. The one of its tensor spares memory, and moving it later. What is replicated a
rank may use alone, to log it for example, and would then go by other placements than the others: it counts only if it
gets a gradient.
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
    """By which something is found again: symbols, while a compiler traces, by their names."""
    try:
        hash(known)
    except TypeError:
        key: Hashable = _torch.named(known)
        return key
    return known


class Hints:
    """Placements by whatever forward and backward pass both know. Those of the last forward pass count."""

    def __init__(self) -> None:
        self._seen: dict[Hashable, Placements] = {}

    def remember(self, key: Hashable, placements: Placements) -> None:
        """In the forward pass; a backward pass has nothing to say of where its own gradients should go."""
        if _torch.in_backward():
            return
        if len(self._seen) >= LARGEST:
            self._seen.clear()
        self._seen[key_of(key)] = placements

    def recall(self, key: Hashable) -> Placements | None:
        """In the backward pass, if it was remembered."""
        return self._seen.get(key_of(key)) if _torch.in_backward() else None


by_shape = Hints()


def hint_of(spec: _torch.Spec) -> tuple[Hashable, Placements]:
    """What is to be remembered `by_shape` of a tensor whose gradient is made of zeros of its shape."""
    placements = tuple(p if isinstance(p, Shard) else Replicate() for p in spec.placements)
    return (spec.mesh, tuple(spec.shape)), placements


def counts(tensor: DTensor) -> bool:
    """Whether all ranks use it in this call: it is sharded, or gets a gradient."""
    return tensor.requires_grad or any(isinstance(placement, Shard) for placement in tensor.placements)


def remember(tensor: DTensor) -> None:
    """Call this in forward for such a tensor."""
    if counts(tensor):
        by_shape.remember(*hint_of(_torch.spec_of(tensor)))


def placements_of(mesh: DeviceMesh, shape: tuple[int, ...]) -> Placements | None:
    """In backward, where the last tensor of this shape was, if that was remembered."""
    return by_shape.recall((mesh, shape))
