"""What a rank sends in a step: by layer, by mesh dimension, to whom, and what is gathered."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

from .. import _torch
from ..sharding.registry import declared
from .trace import Phase, Send, Trace, Use


@dataclass
class LayerTraffic:
    """Bytes and messages that a rank sends for a layer. `least` is how much of its halos it has to send at least, which
    is known of convolutions and poolings."""

    layer: str
    forward_bytes: int = 0
    backward_bytes: int = 0
    halo_bytes: int = 0
    reduction_bytes: int = 0
    gather_bytes: int = 0
    reshard_bytes: int = 0
    messages: int = 0
    least: int | None = None

    @property
    def bytes(self) -> int:
        return self.halo_bytes + self.other_bytes

    @property
    def other_bytes(self) -> int:
        return self.reduction_bytes + self.gather_bytes + self.reshard_bytes


class Neighbour(NamedTuple):
    """A rank that halos are sent to: where it lies, in steps along each mesh dimension, and the bytes."""

    rank: int
    steps: dict[str, int]
    bytes: int


class Gather(NamedTuple):
    """An operator that makes a tensor whole on every rank."""

    layer: str
    where: str | None
    operator: str
    bytes: int
    remedy: str


def sends(trace: Trace) -> list[Send]:
    """Return the collectives of the step that send something: of more than one rank."""
    return [event for event in trace.step if isinstance(event, Send) and event.peers]


def by_layer(trace: Trace) -> list[LayerTraffic]:
    """Return the traffic of each layer, in the order in which they first send something."""
    found: dict[str, LayerTraffic] = {}
    for event in sends(trace):
        row = found.setdefault(event.layer, LayerTraffic(event.layer))
        row.messages += 1
        if event.phase is Phase.FORWARD:
            row.forward_bytes += event.bytes
        else:
            row.backward_bytes += event.bytes
        name = f"{event.use}_bytes"
        setattr(row, name, getattr(row, name) + event.bytes)
    for need in trace.needs:
        if need.layer in found:
            row = found[need.layer]
            row.least = (row.least or 0) + need.least
    return list(found.values())


def by_mesh_dim(trace: Trace) -> dict[str, int]:
    """Return bytes by mesh dimension. What goes to a diagonal neighbour counts for the outermost one that it crosses,
    and a collective for each mesh dimension along which its ranks lie."""
    found: Counter[str] = Counter(dict.fromkeys(trace.mesh, 0))
    for event in sends(trace):
        for rank, size in event.to:
            steps = _steps(trace, rank)
            found[next(iter(steps), "")] += size
        for name in () if event.to else event.along:
            found[name] += event.bytes
    return {name: found[name] for name in trace.mesh}


def neighbours(trace: Trace) -> list[Neighbour]:
    """Return the ranks that this one sends halos to, the busiest first."""
    found: Counter[int] = Counter()
    for event in sends(trace):
        found.update(dict(event.to))
    return [Neighbour(rank, _steps(trace, rank), size) for rank, size in found.most_common()]


def _steps(trace: Trace, rank: int) -> dict[str, int]:
    """Return the steps from this rank to another one, along the mesh dimensions in which they differ."""
    sizes = list(trace.mesh.values())
    places = zip(trace.mesh, _coordinate(rank, sizes), trace.coordinate, strict=True)
    return {name: there - here for name, there, here in places if there != here}


def _coordinate(rank: int, sizes: Sequence[int]) -> list[int]:
    return [rank // prod(sizes[at + 1 :]) % size for at, size in enumerate(sizes)]


def gathers(trace: Trace) -> list[Gather]:
    """Return the operators that gather a tensor, each with a remedy from its rule."""
    rules = {_torch.name_of(operator): behaviour for operator, behaviour in declared().items()}
    found: Counter[tuple[str, str | None, str]] = Counter()
    for event in sends(trace):
        # FSDP2 gathers parameters, which is its work, and norms the moments of each rank, in place of a reduction.
        if event.use is Use.GATHER and event.where is not None:
            found[event.layer, event.where, event.operator] += event.bytes
    return [
        Gather(layer, where, operator, size, _remedy(operator, rules.get(operator)))
        for (layer, where, operator), size in found.items()
    ]


def _remedy(operator: str, rule: object) -> str:
    stays = getattr(rule, "stays", "")
    if stays and operator:
        return f"{operator} does not gather where what is sharded is: {stays}"
    return f"shard another dimension before {operator or 'it'}, or call it on something smaller"
