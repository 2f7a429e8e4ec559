"""Schedules: what this rank sends to whom and receives from whom, as boxes of the tensors given.

Made once, from integers alone; `start` in `exchange.py` runs them. Each has its adjoint, `transposed`. All kinds of
communication from rank to rank are constructors here.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import NamedTuple, Protocol

import torch
import torch.distributed as dist

from ..geometry import Box, Everywhere, FlatRanges, Grid, HaloPlan, Interval, Moves, Shards, Stripes, volume
from .rank_line import RankLine
from .wire import Hop, Message, Wire, wire

Transfers = Iterable[tuple[int, tuple[Box, ...]]]  # by rank, in ascending order


class AnyMoves(Protocol):
    """What is sent of one tensor: any rank's transfers, to which other ranks' agree."""

    def sends(self, rank: int, /) -> Transfers: ...
    def receives(self, rank: int, /) -> Transfers: ...


class Piece(NamedTuple):
    """A box of one of the tensors."""

    tensor: int
    box: Box


class Shaped(NamedTuple):
    """What a message needs to know of a tensor: which of its dimensions have boxes, and how large the others are."""

    dims: tuple[int, ...]
    shape: torch.Size

    def of(self, box: Box) -> torch.Size:
        sizes = list(self.shape)
        for dim, side in zip(self.dims, box, strict=True):
            sizes[dim] = side.size
        return torch.Size(sizes)

    @property
    def rest(self) -> int:
        return prod(length for dim, length in enumerate(self.shape) if dim not in self.dims)


@dataclass(frozen=True, eq=False)
class Schedule:
    """What this rank sends along a line of ranks and receives, of one or several tensors.

    `silent` says that no rank of the line sends anything: all know it, and leave the exchange out.
    """

    line: RankLine
    moves: tuple[AnyMoves, ...]  # of each tensor
    silent: bool = False
    backwards: bool = False

    def transposed(self) -> Schedule:
        """The adjoint: what was received is sent back."""
        return self._transposed

    @cached_property
    def _transposed(self) -> Schedule:
        return Schedule(self.line, self.moves, self.silent, not self.backwards)

    @cached_property
    def sends(self) -> tuple[tuple[int, Piece], ...]:
        """By destination, those that the first hop, which is along the last mesh dimension, reaches together."""
        return tuple(sorted(self._pieces(self.line.rank, True), key=lambda entry: self._sending_order(entry[0])))

    def _sending_order(self, rank: int) -> tuple[int, int]:
        return rank % self.line.sizes[-1], rank

    def one_sided(self, rank: int) -> bool:
        """Whether a rank sends nothing, or receives nothing: a compiler sees no way through it from what was before the
        exchange to what comes after it."""
        return any(next(self._pieces(rank, outgoing), None) is None for outgoing in (True, False))

    @cached_property
    def sent_before_token(self) -> int:
        """How many pieces come before this rank's message to itself."""
        own = self._sending_order(self.line.rank)
        return sum(self._sending_order(peer) < own for peer, _ in self.sends)

    @cached_property
    def receives(self) -> tuple[tuple[int, Piece], ...]:
        """By source, in their order."""
        return tuple(sorted(self._pieces(self.line.rank, False), key=lambda entry: entry[0]))

    def _pieces(self, rank: int, outgoing: bool) -> Iterator[tuple[int, Piece]]:
        for tensor, moves in enumerate(self.moves):
            transfers = moves.sends(rank) if outgoing != self.backwards else moves.receives(rank)
            for peer, boxes in transfers:
                for box in boxes:
                    yield peer, Piece(tensor, box)

    def wire(self, tensors: tuple[Shaped, ...], token: int) -> Wire:
        """The messages for tensors of these shapes; `token` is the length of a one-sided rank's message to itself."""
        if token:
            return self._wire(tensors, token)  # sizes may be symbols while tracing
        if tensors not in self._wires:
            self._wires[tensors] = self._wire(tensors, token)
        return self._wires[tensors]

    @cached_property
    def _wires(self) -> dict[tuple[Shaped, ...], Wire]:
        return {}

    def _wire(self, tensors: tuple[Shaped, ...], token: int) -> Wire:
        rests = [tensor.rest for tensor in tensors]

        def messages(rank: int, outgoing: bool) -> Iterator[Message]:
            counts: dict[int, int] = {rank: token} if token and self.one_sided(rank) else {}
            for peer, piece in self._pieces(rank, outgoing):
                counts[peer] = counts.get(peer, 0) + volume(piece.box) * rests[piece.tensor]
            for peer, count in sorted(counts.items()):
                yield Message(rank, peer, count) if outgoing else Message(peer, rank, count)

        coming = [(source, tensors[piece.tensor].of(piece.box)) for source, piece in self.receives]
        return wire(self.line, messages, coming, token if token and self.one_sided(self.line.rank) else 0)


@dataclass(frozen=True)
class Halo:
    """What is sent of one tensor along its split dimension number `axis`, by `plan`.

    `box` is what the rank must hold in the end, clipped to the tensor: the same along the other axes on a whole line.
    """

    axis: int
    plan: HaloPlan
    box: Box


def halo(line: RankLine, *halos: Halo) -> Schedule:
    """Of each of several tensors the parts of one dimension that ranks need and others own."""
    moves = tuple(one.plan.along(one.axis, one.box) for one in halos)
    return Schedule(line, moves, all(one.plan.silent for one in halos))


def boxes(line: RankLine, owned: Grid, needed: Grid) -> Schedule:
    """From boxes of a tensor that ranks own to others that they need."""
    return Schedule(line, (Moves(owned, needed),))


def reshard(line: RankLine, before: int, after: int) -> Schedule:
    """Shard(i) -> Shard(j): of dimensions of these sizes the first was sharded over the line, and the second will be.

    Its boxes have these two sides.
    """
    along = tuple(range(len(line.sizes)))
    owned = Grid(line.sizes, (Shards(before, line.sizes), Interval(0, after)), (along, ()))
    needed = Grid(line.sizes, (Interval(0, before), Shards(after, line.sizes)), ((), along))
    return boxes(line, owned, needed)


def broadcast_from_owner(line: RankLine, size: int, index: int) -> Schedule:
    """One index of a sharded dimension of this size, from the rank that owns it to all others."""
    plan = HaloPlan(Shards(size, line.sizes), Everywhere(Interval(index, index + 1), line.size))
    return Schedule(line, (plan.along(0, (Interval(0, size),)),), line.size == 1)


def flat_ranges(line: RankLine, stripes: Stripes, ranges: FlatRanges) -> Schedule:
    """Elements in a row: from stripes of their table to ranges of their numbers. The transpose goes the other way."""
    return Schedule(line, (Moves(stripes, ranges),))


@dataclass(frozen=True)
class RowSchedule:
    """So many rows of a tensor for each rank of one mesh dimension, one rank after the other, and so many that come in
    from each. Only this rank knows these numbers, and so it hands on no messages of others."""

    group: dist.ProcessGroup
    sent: list[int]
    received: list[int]

    def transposed(self) -> RowSchedule:
        return RowSchedule(self.group, self.received, self.sent)

    def wire(self, rest: int) -> Wire:
        """`rest` is the length of a row."""
        incoming, outgoing = ([count * rest for count in counts] for counts in (self.received, self.sent))
        return Wire((Hop(self.group, [], [], incoming, outgoing),))
