"""What a rank sends in a step: by layer, by mesh dimension, and what is gathered."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from .trace import Phase, Send, Trace, Use


@dataclass
class LayerTraffic:
    """Bytes and messages that a rank sends for a layer."""

    layer: str
    forward_bytes: int = 0
    backward_bytes: int = 0
    halo_bytes: int = 0
    reduction_bytes: int = 0
    gather_bytes: int = 0
    halo_messages: int = 0
    messages: int = 0


class Gather(NamedTuple):
    """An operator that makes a tensor whole on every rank."""

    layer: str
    where: str | None
    bytes: int


def sends(trace: Trace) -> list[Send]:
    """Collectives of one rank send nothing."""
    return [event for event in trace.step if isinstance(event, Send) and event.peers]


def by_layer(trace: Trace) -> list[LayerTraffic]:
    """In the order in which layers first send something."""
    found: dict[str, LayerTraffic] = {}
    for event in sends(trace):
        row = found.setdefault(event.layer, LayerTraffic(event.layer))
        row.messages += 1
        row.halo_messages += event.use is Use.HALO
        if event.phase is Phase.FORWARD:
            row.forward_bytes += event.bytes
        else:
            row.backward_bytes += event.bytes
        name = f"{event.use}_bytes"
        setattr(row, name, getattr(row, name) + event.bytes)
    return list(found.values())


def by_mesh_dim(trace: Trace, mesh: Mapping[str, int]) -> dict[str, int]:
    """What goes over all ranks at once counts for each mesh dimension."""
    found: Counter[str] = Counter(dict.fromkeys(mesh, 0))
    for event in sends(trace):
        for name in event.along or tuple(mesh):
            found[name] += event.bytes
    return dict(found)


def gathers(trace: Trace) -> list[Gather]:
    found: dict[tuple[str, str | None], int] = {}
    for event in sends(trace):
        if event.use is Use.GATHER:
            key = event.layer, event.where
            found[key] = found.get(key, 0) + event.bytes
    return [Gather(layer, where, size) for (layer, where), size in found.items()]
