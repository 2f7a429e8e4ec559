"""Where tensors were in the forward pass, by their shapes: torch asks for some gradients by sizes only.

Any placement of a gradient is exact. The one of its tensor spares memory, and moving it later.
"""

from __future__ import annotations

from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.placement_types import Placement, Replicate, Shard

from .. import _torch

Placements = tuple[Placement, ...]

_seen: dict[tuple[DeviceMesh, tuple[int, ...]], Placements] = {}


def remember(spec: _torch.Spec) -> None:
    """Call this in forward for a tensor whose gradient is made of zeros of its shape."""
    if len(_seen) > 4096:
        _seen.clear()
    _seen[spec.mesh, tuple(spec.shape)] = tuple(p if isinstance(p, Shard) else Replicate() for p in spec.placements)


def placements_of(mesh: DeviceMesh, shape: tuple[int, ...]) -> Placements | None:
    """In backward, where the last tensor of this shape was, if that was remembered."""
    return _seen.get((mesh, shape)) if _torch.in_backward() else None
