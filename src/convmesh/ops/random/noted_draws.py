"""The states of generators before draws, noted while somebody wants to compare them.

Ranks draw the numbers of one device if their generators are in the same state. Where the states differ, tensors that
are called replicated are not.
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
    """A thread may be a rank."""

    def __init__(self) -> None:
        self.by_mesh: dict[DeviceMesh, bytes] = {}


_noted = _Noted()


def note(layout: Layout, device: torch.device, generator: torch.Generator | None) -> None:
    """Numbers for a tensor are about to be drawn on this rank."""
    before = _noted.by_mesh.get(layout.mesh)
    if before is not None and not _torch.tracing():
        state = _state(device, generator).numpy().tobytes()
        _noted.by_mesh[layout.mesh] = blake2b(before + state, digest_size=_BYTES).digest()


def taken(mesh: DeviceMesh, going_on: bool) -> int:
    """A digest of what was noted since the last call, 0 for nothing; and whether to note what comes."""
    found = _noted.by_mesh.pop(mesh, b"")
    if going_on:
        _noted.by_mesh[mesh] = b""
    return int.from_bytes(found)


def _state(device: torch.device, generator: torch.Generator | None) -> torch.Tensor:
    if generator is not None:
        return generator.get_state()
    state: torch.Tensor = (torch if device.type == "cpu" else torch.get_device_module(device)).get_rng_state()
    return state
