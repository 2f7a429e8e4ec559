"""The messages of a schedule as the collective takes them: prepared lists of lengths, for each hop along the line."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from math import prod
from typing import NamedTuple

import torch
import torch.distributed as dist

from .. import _torch
from . import traffic
from .rank_line import RankLine


class Message(NamedTuple):
    source: int
    destination: int
    length: int


class Hop(NamedTuple):
    """One all-to-all. Before it, messages of these lengths, if any, are put into this order."""

    group: dist.ProcessGroup
    lengths: list[int]
    order: list[int]
    incoming: list[int]
    outgoing: list[int]


class Wire(NamedTuple):
    """All hops, and the pieces that have come in after the last of them: their shapes, in their order."""

    hops: tuple[Hop, ...]
    shapes: Sequence[torch.Size] = ()
    lengths: Sequence[int] = ()
    token: int | None = None  # the piece that is this rank's message to itself: it has a length, and no shape

    def send(self, buffer: torch.Tensor) -> torch.Tensor:
        """Start sending; all hops but the last are awaited."""
        received = buffer
        for number, hop in enumerate(self.hops):
            if number:
                received = _torch.wait(received)
            if hop.order:
                parts = received.split(hop.lengths)
                received = torch.cat([parts[place] for place in hop.order])
            traffic.note(received.numel() * received.element_size())
            received = _torch.all_to_all(received, hop.incoming, hop.outgoing, hop.group)
        return received

    def exchange(self, buffer: torch.Tensor) -> torch.Tensor:
        """Send, and wait for what comes in."""
        if len(self.hops) > 1:
            return _torch.wait(self.send(buffer))
        hop = self.hops[0]
        traffic.note(buffer.numel() * buffer.element_size())
        return _torch.exchange(buffer, hop.incoming, hop.outgoing, hop.group)


AnyMessages = Callable[[int, bool], Iterable[Message]]


def wire(line: RankLine, messages: AnyMessages, coming: Sequence[tuple[int, torch.Size]], token: int) -> Wire:
    """`messages(rank, outgoing)` are all that any rank sends, or receives; `coming` is what this one receives, by
    source; `token` is the length of its message to itself."""
    lengths = [prod(shape) for _, shape in coming]
    place = sum(source < line.rank for source, _ in coming) if token else None
    if place is not None:
        lengths.insert(place, token)
    return Wire(_hops(line, messages), [shape for _, shape in coming], lengths, place)


def _hops(line: RankLine, messages: AnyMessages) -> tuple[Hop, ...]:
    """Along the last mesh dimension first. Before hop `d` a message is where its source is along the mesh dimensions
    up to `d`, and where its destination is along those after it."""
    hops = []
    held = list(messages(line.rank, True))
    arrived: list[Message] = []  # in the order of the last hop's result
    for number in reversed(range(len(line.sizes))):
        size, below = line.sizes[number], prod(line.sizes[number + 1 :])

        def place(rank: int, size: int = size, below: int = below) -> int:
            return rank // below % size

        held.sort(key=lambda message: (place(message.destination), message[:2]))
        at = {message[:2]: place for place, message in enumerate(arrived)}
        order = [at[message[:2]] for message in held] if arrived else []
        coming = _passing(line, below * size, messages)
        coming.sort(key=lambda message: (place(message.source), message[:2]))
        incoming, outgoing = [0] * size, [0] * size
        for message in held:
            outgoing[place(message.destination)] += message.length
        for message in coming:
            incoming[place(message.source)] += message.length
        sorted_already = order == list(range(len(order)))
        lengths = [message.length for message in arrived]
        hops.append(Hop(line.groups[number], lengths, [] if sorted_already else order, incoming, outgoing))
        held, arrived = list(coming), coming
    return tuple(hops)


def _passing(line: RankLine, block: int, messages: AnyMessages) -> list[Message]:
    """The messages that this rank has after a hop: of sources in its block of so many ranks, for destinations at its
    own place in theirs."""
    here, base = line.rank % block, line.rank - line.rank % block
    if block == line.size:
        return list(messages(line.rank, False))
    if block <= line.size // block:
        sent = (message for source in range(base, base + block) for message in messages(source, True))
        return [message for message in sent if message.destination % block == here]
    received = (message for destination in range(here, line.size, block) for message in messages(destination, False))
    return [message for message in received if base <= message.source < base + block]
