"""Digests of generator states before draws, recorded while ranks compare them.

Ranks draw the numbers of one device only if their generators are in the same state. Otherwise tensors that are marked
as replicated differ.
"""

from __future__ import annotations

from hashlib import blake2b
from threading import local

import torch
from torch.distributed.device_mesh import DeviceMesh

from ... import _torch
from ...sharding.layout import Layout

_BYTES = 7


class _Noted(local):
    """Thread-local, because a thread may be a rank."""

    def __init__(self) -> None:
        self.by_mesh: dict[DeviceMesh, bytes] = {}


_noted = _Noted()


def note(layout: Layout, device: torch.device, generator: torch.Generator | None) -> None:
    """Record the generator's state before this rank draws numbers for a tensor."""
    before = _noted.by_mesh.get(layout.mesh)
    if before is not None and not _torch.tracing():
        state = _state(device, generator).numpy().tobytes()
        _noted.by_mesh[layout.mesh] = blake2b(before + state, digest_size=_BYTES).digest()


def taken(mesh: DeviceMesh, going_on: bool) -> int:
    """Return a digest of all states since the last call, or 0; `going_on` says whether to record further ones."""
    found = _noted.by_mesh.pop(mesh, b"")
    if going_on:
        _noted.by_mesh[mesh] = b""
    return int.from_bytes(found)


def _state(device: torch.device, generator: torch.Generator | None) -> torch.Tensor:
    if generator is not None:
        return generator.get_state()
    state: torch.Tensor = getattr(torch.get_device_module(device), "get_rng_state", torch.get_rng_state)()
    return state
