"""An estimate of a step's time: local operators one after the other, collectives beside them until somebody waits."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod

from .devices import Device, Link
from .trace import Compute, Send, Trace, Use, Wait


@dataclass(frozen=True)
class Time:
    """Seconds of a step. `waiting` is the part of the communication that no compute hides."""

    step: float
    compute: float
    communication: float
    waiting: float


Seconds = Callable[[Compute], float]


def time_of(trace: Trace, mesh: Mapping[str, int], device: Device, seconds: Seconds | None = None) -> Time:
    """By the roofline of a device, or by `seconds` of every operator."""
    cost = seconds or (lambda operator: roofline(operator, device))
    clock = compute = communication = waiting = free = 0.0
    arrives: dict[int, float] = {}
    for event in trace.step:
        if isinstance(event, Compute):
            taken = cost(event)
            compute += taken
            clock += taken
        elif isinstance(event, Send):
            taken = sending(event, link(event.along, mesh, device))
            communication += taken
            free = max(clock, free) + taken  # one collective at a time
            arrives[event.number] = free
        elif isinstance(event, Wait) and (arrival := arrives.pop(event.number, 0.0)) > clock:
            waiting += arrival - clock
            clock = arrival
    return Time(clock, compute, communication, waiting)


def roofline(operator: Compute, device: Device) -> float:
    arithmetic = operator.flops / device.rate(operator.dtype)
    return max(device.overhead, arithmetic, operator.bytes / (device.bandwidth * device.memory_share))


def sending(event: Send, by: Link) -> float:
    """A ring for reductions and gathers; the halos of a rank leave through one link."""
    ranks = event.peers + 1
    if event.use is Use.HALO:
        return by.latency + event.bytes / by.bandwidth
    rounds = 2 * event.peers if event.use is Use.REDUCTION else event.peers
    piece = event.bytes / ranks if event.use is Use.REDUCTION else event.bytes
    return by.latency * (ranks - 1).bit_length() + rounds * piece / by.bandwidth


def link(along: tuple[str, ...], mesh: Mapping[str, int], device: Device) -> Link:
    """The slowest that a collective along these mesh dimensions uses. The last mesh dimensions are within nodes."""
    names = list(mesh)
    outermost = min((names.index(name) for name in along or names[:1]), default=0)
    return device.node if prod(list(mesh.values())[outermost:]) <= device.node_ranks else device.network
