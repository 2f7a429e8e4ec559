"""An estimate of a step's time: local operators one after the other, collectives beside them until somebody waits."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from math import prod

from .devices import Device, Link
from .trace import Compute, Send, Trace, Use, Wait


class Bound(StrEnum):
    """What an operator's time comes from."""

    ARITHMETIC = "arithmetic"
    MEMORY = "memory traffic"
    OVERHEAD = "starting operators"


@dataclass(frozen=True)
class Time:
    """Seconds of a step. `waiting` is the part of the communication that no compute hides, and `bounds` says what the
    seconds of compute are made of."""

    step: float
    compute: float
    communication: float
    waiting: float
    bounds: dict[Bound, float]


Seconds = Callable[[Compute], float]


def time_of(trace: Trace, device: Device, measured: float | None = None) -> Time:
    """Estimate a step by the roofline of a device. If `measured` is what all local operators took, each has its
    share."""
    clock = communication = waiting = free = 0.0
    bounds: Counter[Bound] = Counter()
    arrives: dict[int, float] = {}
    slower = device.sharing(prod(trace.mesh.values()))
    if measured is not None:
        slower *= measured / sum(roofline(event, device) for event in trace.step if isinstance(event, Compute))
    for event in trace.step:
        if isinstance(event, Compute):
            taken, bound = _cost(event, device)
            bounds[bound] += taken * slower  # type: ignore[assignment]
            clock += taken * slower
        elif isinstance(event, Send):
            taken = sending(event, trace.mesh, device)
            communication += taken
            free = max(clock, free) + taken  # one collective at a time
            arrives[event.number] = free
            if not device.overlaps:
                waiting += free - clock
                clock = free
        elif isinstance(event, Wait) and (arrival := arrives.pop(event.number, 0.0)) > clock:
            waiting += arrival - clock
            clock = arrival
    return Time(clock, sum(bounds.values()), communication, waiting, dict(bounds))


def _cost(operator: Compute, device: Device) -> tuple[float, Bound]:
    limits = {
        Bound.ARITHMETIC: operator.flops / device.rate(operator.dtype),
        Bound.MEMORY: operator.bytes / (device.bandwidth * device.memory_share),
        Bound.OVERHEAD: device.overhead,
    }
    bound = max(limits, key=lambda one: limits[one])
    return limits[bound], bound


def roofline(operator: Compute, device: Device) -> float:
    return _cost(operator, device)[0]


def sending(event: Send, mesh: Mapping[str, int], device: Device) -> float:
    """Return the seconds of a collective: reductions and gathers go in a ring, a rank's halos through one link."""
    if not event.peers:
        return 0.0
    by = link(event.along, mesh, device)
    ranks = event.peers + 1
    if event.use is Use.HALO:
        return by.latency + event.bytes / by.bandwidth
    if event.use is Use.RESHARD:
        return by.latency + event.bytes * event.peers / ranks / by.bandwidth
    by = device.sums or by
    rounds = 2 * event.peers if event.use is Use.REDUCTION else event.peers
    piece = event.bytes / ranks if event.use is Use.REDUCTION else event.bytes
    return by.latency * (ranks - 1).bit_length() + rounds * piece / by.bandwidth


def crosses_nodes(name: str, mesh: Mapping[str, int], node_ranks: int) -> bool:
    """Whether neighbours along a mesh dimension are in different nodes. The last mesh dimensions are within nodes."""
    return prod(list(mesh.values())[list(mesh).index(name) :]) > node_ranks


def link(along: tuple[str, ...], mesh: Mapping[str, int], device: Device) -> Link:
    """Return the slowest link that a collective along these mesh dimensions uses."""
    apart = any(crosses_nodes(name, mesh, device.node_ranks) for name in along or tuple(mesh)[:1])
    return device.network if apart else device.node
