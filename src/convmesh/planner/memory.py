"""Memory of a rank over a step, from the lives of its storages: the peak, what it is made of, and the curve."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from .trace import Block, Compute, Kind, Phase, Send, Trace

POINTS = 400  # of a curve


@dataclass(frozen=True)
class Moment:
    """What a rank holds while a layer works, in bytes."""

    layer: str
    phase: Phase
    parts: dict[Kind, int]

    @property
    def total(self) -> int:
        return sum(self.parts.values())


@dataclass(frozen=True)
class Memory:
    """The memory of one rank over one step, in bytes."""

    peak: Moment
    curve: list[Moment]
    saved: dict[str, int]  # by layer, the activations that it keeps for its backward pass


def memory_of(trace: Trace) -> Memory:
    """Summarise a trace. Activations are what forward leaves for backward; what nobody keeps that long is temporary."""
    kinds = kinds_of(trace)
    saved: Counter[str] = Counter()
    for block, kind in zip(trace.blocks, kinds, strict=True):
        if kind is Kind.ACTIVATIONS and block.born >= trace.begins:
            saved[block.layer] += block.size
    moments = list(_moments(trace, kinds)) or [Moment("", Phase.FORWARD, dict.fromkeys(Kind, 0))]
    return Memory(max(moments, key=lambda moment: moment.total), _thinned(moments), dict(saved))


def kinds_of(trace: Trace) -> list[Kind]:
    """Return what each storage is for."""
    turn = first_backward(trace)
    return [_kind(block, turn) for block in trace.blocks]


def first_backward(trace: Trace) -> int:
    """Return the event with which the backward pass of the step begins."""
    for number, event in enumerate(trace.step):
        if isinstance(event, Compute | Send) and event.phase is Phase.BACKWARD:
            return trace.begins + number
    return len(trace.events)


def _kind(block: Block, turn: int) -> Kind:
    if block.kind is not None:
        return block.kind
    lasts = block.died is None or block.died > turn
    return Kind.ACTIVATIONS if block.phase is Phase.FORWARD and lasts else Kind.TEMPORARIES


def _moments(trace: Trace, kinds: list[Kind]) -> Iterator[Moment]:
    """Yield for each event at which memory changes its largest moment: results are there before arguments go."""
    held: Counter[Kind] = Counter()
    total, number, most, parts = 0, trace.begins, -1, dict(held)
    layer, phase = "", Phase.FORWARD
    for at, block, sign in (*trace.changes, (len(trace.events) + 1, None, 0)):
        if at > number:
            if most >= 0:
                event = trace.events[number - 1] if trace.begins < number <= len(trace.events) else None
                if isinstance(event, Compute | Send):
                    layer, phase = event.layer, event.phase
                yield Moment(layer, phase, {kind: parts.get(kind, 0) for kind in Kind})
            number, most = at, -1
        if block is None:
            return
        size = sign * trace.blocks[block].size
        held[kinds[block]] += size
        total += size
        if at >= trace.begins and total > most:
            most, parts = total, dict(held)


def _thinned(moments: list[Moment]) -> list[Moment]:
    """Return the largest moment of each of `POINTS` stretches."""
    size = max(1, -(-len(moments) // POINTS))
    return [max(moments[at : at + size], key=lambda moment: moment.total) for at in range(0, len(moments), size)]
