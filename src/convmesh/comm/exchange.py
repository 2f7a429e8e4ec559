"""The one exchange of the library: it runs a schedule.

A collective is started by `start` and awaited by `finish`, so that work can go on in between.
Everything that is sent along one line of ranks at one time goes in one message a pair of ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import torch

from .. import _torch
from ..geometry import Box
from .blocks import Block, Held
from .schedule import RowSchedule, Schedule, Shaped
from .wire import Wire


@dataclass
class Pending:
    """An exchange that has been started."""

    schedule: Schedule
    tensors: int
    arriving: torch.Tensor | None = None  # None where nothing is sent between any two ranks
    wire: Wire | None = None

    def finish(self, accumulate: Sequence[Held] = ()) -> list[list[Block]]:
        """Wait for the exchange, and return the blocks received for each tensor given to `start`.

        They are also added to the tensors of `accumulate`, which have blocks that contain them.
        """
        blocks: list[list[Block]] = [[] for _ in range(self.tensors)]
        if self.arriving is None or self.wire is None:
            return blocks
        received = _torch.wait(self.arriving)
        parts = [received] if len(self.wire.lengths) == 1 else list(received.split(self.wire.lengths))
        if self.wire.token is not None:
            del parts[self.wire.token]
        for (_, piece), part, shape in zip(self.schedule.receives, parts, self.wire.shapes, strict=True):
            blocks[piece.tensor].append(Block(piece.box, part.view(shape)))
        for into, arrived in zip(accumulate, blocks, strict=False):
            for block in arrived:
                into.read(block.box).add_(block.data)
        return blocks


def start(schedule: Schedule, tensors: Sequence[Held]) -> Pending:
    """Send what others need of each of `tensors`. All ranks of the schedule's line call this, or none does."""
    if schedule.silent:
        return Pending(schedule, len(tensors))
    shaped = tuple([Shaped(one.dims, one.blocks[0].data.shape) for one in tensors])
    parts = [tensors[piece.tensor].read(piece.box) for _, piece in schedule.sends]
    data = tensors[0].blocks[0].data
    tracing = _torch.tracing()
    if tracing and schedule.one_sided(schedule.line.rank):
        # A message to itself, a number of the tensor: so every rank's exchange depends on that tensor, and every rank's
        # result can depend on the exchange, also where a rank sends or receives nothing.
        own = data.reshape(-1)[:1] if data.numel() else data.sum(dtype=data.dtype).reshape(1)
        parts.insert(schedule.sent_before_token, own)
    wire = schedule.wire(shaped, int(tracing))
    return Pending(schedule, len(tensors), wire.send(joined(parts, data)), wire)


def exchange_rows(schedule: RowSchedule, rows: torch.Tensor) -> torch.Tensor:
    """Send rows, which are sorted by destination rank; return the received ones, sorted by source rank."""
    received = _torch.wait(schedule.wire(prod(rows.shape[1:])).send(rows.reshape(-1)))
    # Rows of nothing are counted too: a rank may hold none of what they have along a sharded dimension.
    return received.view(sum(schedule.received), *rows.shape[1:])


def joined(pieces: list[torch.Tensor], like: torch.Tensor, alike: bool = False) -> torch.Tensor:
    """Concatenate the elements of all pieces; `alike` says that they have the same shape."""
    if len(pieces) == 1:
        # What goes to one rank only is sent as it is, which may be a part of another tensor.
        return pieces[0].contiguous().view(-1)
    if not pieces:
        return like.new_empty(0)
    if alike and type(like) is torch.Tensor and like.is_contiguous():
        return torch.stack(pieces).view(-1)
    if alike:
        # In memory of its own, or else torch chooses an order by the pieces' strides.
        rows = like.new_empty((len(pieces), *pieces[0].shape))
        return torch.stack(pieces, out=rows).view(-1)
    return torch.cat([piece.reshape(-1) for piece in pieces])


def fetch(schedule: Schedule, tensor: torch.Tensor, dims: tuple[int, ...], owned: Box, needed: Box) -> torch.Tensor:
    """This rank's box of a tensor after an exchange; the schedule's boxes are along `dims`."""
    held = Held.own(tensor, dims, owned)
    return held.plus(start(schedule, [held]).finish()[0]).read(needed)


def give_back(schedule: Schedule, gradients: Held, owned: Box) -> torch.Tensor:
    """The adjoint of `fetch`: return what this rank owns of the sum of all ranks' `gradients`.

    `gradients` has a block for every index that this rank needed, also of those that it owns.
    """
    total = Held.own(gradients.read(owned).clone(), gradients.dims, owned)
    start(schedule.transposed(), [gradients]).finish(accumulate=[total])
    return total.blocks[0].data
