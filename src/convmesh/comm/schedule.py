"""Schedules: what this rank sends and receives, as boxes of the tensors given.

They are made once, from integers alone, and run by `start` in `exchange.py`. `transposed` is the adjoint. All kinds of
point-to-point communication are constructors in this file.
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

Transfers = Iterable[tuple[int, tuple[Box, ...]]]  # (peer, boxes), in ascending order of the peers


class AnyMoves(Protocol):
    """The transfers of one tensor, computed for any rank; sender and receiver must agree on them."""

    def sends(self, rank: int, /) -> Transfers: ...
    def receives(self, rank: int, /) -> Transfers: ...


class Piece(NamedTuple):
    """A box of one of the tensors of an exchange."""

    tensor: int
    box: Box


class Shaped(NamedTuple):
    """The properties of a tensor that its messages depend on: the dimensions of the boxes, and its shape."""

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
    """What this rank sends and receives along a rank line, for one or several tensors.

    `silent` says that no rank of the line sends anything: all ranks know that, and skip the exchange.
    """

    line: RankLine
    moves: tuple[AnyMoves, ...]  # one for each tensor
    silent: bool = False
    backwards: bool = False

    def transposed(self) -> Schedule:
        """The adjoint: everything that was received is sent back."""
        return self._transposed

    @cached_property
    def _transposed(self) -> Schedule:
        return Schedule(self.line, self.moves, self.silent, not self.backwards)

    @cached_property
    def sends(self) -> tuple[tuple[int, Piece], ...]:
        """(destination, piece), grouped by the rank of the first hop, which is along the last mesh dimension."""
        return tuple(sorted(self._pieces(self.line.rank, True), key=lambda entry: self._sending_order(entry[0])))

    def _sending_order(self, rank: int) -> tuple[int, int]:
        return rank % self.line.sizes[-1], rank

    def one_sided(self, rank: int) -> bool:
        """Whether a rank sends nothing, or receives nothing.

        Its graph has no data dependence through the exchange then, which a compiler could drop or move.
        """
        return any(next(self._pieces(rank, outgoing), None) is None for outgoing in (True, False))

    @cached_property
    def sent_before_token(self) -> int:
        """The number of pieces sent before this rank's message to itself."""
        own = self._sending_order(self.line.rank)
        return sum(self._sending_order(peer) < own for peer, _ in self.sends)

    @cached_property
    def receives(self) -> tuple[tuple[int, Piece], ...]:
        """(source, piece), in the order of the sources."""
        return tuple(sorted(self._pieces(self.line.rank, False), key=lambda entry: entry[0]))

    def _pieces(self, rank: int, outgoing: bool) -> Iterator[tuple[int, Piece]]:
        for tensor, moves in enumerate(self.moves):
            transfers = moves.sends(rank) if outgoing != self.backwards else moves.receives(rank)
            for peer, boxes in transfers:
                for box in boxes:
                    yield peer, Piece(tensor, box)

    def wire(self, tensors: tuple[Shaped, ...], token: int) -> Wire:
        """Return the messages for these shapes; `token` is the length of a one-sided rank's message to itself."""
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
    """The halo exchange of one tensor along its sharded dimension number `axis`, by `plan`.

    `box` is what the rank must hold in the end, clipped to the tensor. Its sides along other axes are the same on all
    ranks of the line.
    """

    axis: int
    plan: HaloPlan
    box: Box


def halo(line: RankLine, *halos: Halo) -> Schedule:
    """Schedule of the halo exchanges of several tensors, in one message per pair of ranks."""
    moves = tuple(one.plan.along(one.axis, one.box) for one in halos)
    return Schedule(line, moves, all(one.plan.silent for one in halos))


def boxes(line: RankLine, owned: Grid, needed: Grid) -> Schedule:
    """Schedule from the boxes that ranks own of a tensor to the boxes that they need."""
    return Schedule(line, (Moves(owned, needed),))


def reshard(line: RankLine, before: int, after: int) -> Schedule:
    """Schedule for Shard(i) -> Shard(j), where dimensions i and j have the sizes `before` and `after`.

    Its boxes are along these two dimensions.
    """
    along = tuple(range(len(line.sizes)))
    owned = Grid(line.sizes, (Shards(before, line.sizes), Interval(0, after)), (along, ()))
    needed = Grid(line.sizes, (Interval(0, before), Shards(after, line.sizes)), ((), along))
    return boxes(line, owned, needed)


def broadcast_from_owner(line: RankLine, size: int, index: int) -> Schedule:
    """Schedule that sends one index of a sharded dimension of this size from its owner to all other ranks."""
    plan = HaloPlan(Shards(size, line.sizes), Everywhere(Interval(index, index + 1), line.size))
    return Schedule(line, (plan.along(0, (Interval(0, size),)),), line.size == 1)


def flat_ranges(line: RankLine, stripes: Stripes, ranges: FlatRanges) -> Schedule:
    """Schedule from stripes of a table to ranges of its elements in flat order; the transpose is the inverse."""
    return Schedule(line, (Moves(stripes, ranges),))


@dataclass(frozen=True)
class RowSchedule:
    """The numbers of rows that this rank sends to, and receives from, each rank of one mesh dimension, in rank order.

    Only this rank knows these numbers, so it forwards no messages of other ranks.
    """

    group: dist.ProcessGroup
    sent: list[int]
    received: list[int]

    def transposed(self) -> RowSchedule:
        return RowSchedule(self.group, self.received, self.sent)

    def wire(self, rest: int) -> Wire:
        """Return the messages for rows of `rest` elements."""
        incoming, outgoing = ([count * rest for count in counts] for counts in (self.received, self.sent))
        return Wire((Hop(self.group, [], [], incoming, outgoing),))
