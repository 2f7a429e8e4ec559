"""The one exchange of the library: halos travel to who needs them; its adjoint brings their gradients back.

A collective is started by `start` and awaited by `finish`, so that work can go on in between.
Everything that is sent along one line of ranks at one time travels in one message a pair of ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod

import torch

from .. import _torch
from ..geometry import Box, HaloPlan, Interval
from .blocks import Block, Held
from .rank_line import Line


@dataclass(frozen=True)
class Halo:
    """What travels of one tensor along its split dimension number `axis`, by `plan`.

    `box` is what the rank must hold in the end, clipped to the tensor: the same along the other axes on a whole line.
    """

    axis: int
    plan: HaloPlan
    box: Box


@dataclass
class Pending:
    """An exchange under way. `layout` says what comes in, in its order: for which tensor, which box, of what shape."""

    arriving: torch.Tensor | None
    layout: Sequence[tuple[int, Box, torch.Size]]
    jobs: int
    token: slice
    _awaited: torch.Tensor | None = None

    def finish(self) -> list[list[Block]]:
        """For every tensor that was given to `start`, the blocks that came in for it."""
        blocks: list[list[Block]] = [[] for _ in range(self.jobs)]
        at = 0
        for job, box, shape in self.layout:
            at += self.token.stop - self.token.start if at == self.token.start else 0
            blocks[job].append(Block(box, self._received[at : at + prod(shape)].view(shape)))
            at += prod(shape)
        return blocks

    @property
    def received(self) -> torch.Tensor | None:
        """Something that only a finished exchange has, for `_torch.tie`."""
        return None if self.arriving is None else self._received[self.token]

    @property
    def _received(self) -> torch.Tensor:
        assert self.arriving is not None
        if self._awaited is None:  # not a cached property, whose lock all threads share
            self._awaited = _torch.wait(self.arriving)
        return self._awaited


@dataclass(frozen=True)
class Journey:
    """What one exchange sends from this rank and brings to it, for tensors of known shapes."""

    sends: tuple[tuple[tuple[int, Box], ...], ...]  # by destination: of which tensor, and which box
    coming: tuple[tuple[int, Box, torch.Size], ...]
    counts: tuple[tuple[int, ...], ...]  # numbers in every rank's message to every other


def start(held: Sequence[Held], halos: Sequence[Halo], line: Line) -> Pending:
    """Send along `line` what others need of each of `held`. All ranks of the line call this, or none does."""
    if all(halo.plan.silent for halo in halos):
        return Pending(None, (), len(halos), slice(0, 0))
    shapes = tuple([(one.dims, one.blocks[0].data.shape) for one in held])
    make = _journey.__wrapped__ if _torch.tracing() else _journey  # sizes may be symbols while tracing
    journey: Journey = make(tuple(halos), shapes, line.rank, line.size)
    messages = [_message([held[job].read(box) for job, box in boxes], held) for boxes in journey.sends]
    arriving, token = _send(messages, lambda src, dst: journey.counts[src][dst], line, held[0].blocks[0].data)
    return Pending(arriving, journey.coming, len(halos), token)


@lru_cache(maxsize=4096)
def _journey(
    halos: tuple[Halo, ...], shapes: tuple[tuple[tuple[int, ...], torch.Size], ...], rank: int, size: int
) -> Journey:
    def boxes(src: int, dst: int) -> list[tuple[int, Box]]:
        parts = ((job, halo, part) for job, halo in enumerate(halos) for part in halo.plan.transfer(src, dst))
        return [(job, _slab(halo, part)) for job, halo, part in parts]

    def count(src: int, dst: int) -> int:
        return sum(prod(_shape(*shapes[job], box)) for job, box in boxes(src, dst))

    return Journey(
        tuple(tuple(boxes(rank, dst)) for dst in range(size)),
        tuple((job, box, _shape(*shapes[job], box)) for src in range(size) for job, box in boxes(src, rank)),
        tuple(tuple(count(src, dst) for dst in range(size)) for src in range(size)),
    )


def give_back(gradients: Held, dim: int, plan: HaloPlan, line: Line) -> torch.Tensor:
    """The adjoint of `start` along the one split dimension `dim`: owners add up what was made of what they sent.

    `gradients` has a block for every index that this rank needed, also of those that it owns.
    """
    own = plan.owned[line.rank]
    total = gradients.read((own,)).clone()
    if plan.silent:
        return total

    def shape(part: Interval) -> torch.Size:
        return _shape(gradients.dims, gradients.blocks[0].data.shape, (part,))

    def count(src: int, dst: int) -> int:
        return sum(prod(shape(part)) for part in plan.transfer(dst, src))

    messages = [
        _message([gradients.read((part,)) for part in plan.transfer(owner, line.rank)], [gradients])
        for owner in range(line.size)
    ]
    arriving, token = _send(messages, count, line, gradients.blocks[0].data)
    layout = [(0, (part,), shape(part)) for _, part in plan.sends(line.rank)]
    pending = Pending(arriving, layout, 1, token)
    for block in pending.finish()[0]:
        (part,) = block.box
        total.narrow(dim, part.start - own.start, len(part)).add_(block.data)
    return _torch.tie(total, *(block.data for block in gradients.blocks), tokens=[pending.received])


def _send(
    messages: list[torch.Tensor], count: Callable[[int, int], int], line: Line, data: torch.Tensor
) -> tuple[torch.Tensor, slice]:
    """What arrives, and where in it this rank's message to itself is.

    That message is empty, but for the compiler: there it is a number of the tensor that travels. So every rank's
    exchange depends on that tensor, and every rank's result can be tied to the exchange, whatever else they use of it.
    """
    own = 1 if _torch.tracing() else 0
    if own:
        messages[line.rank] = data.reshape(-1)[:1] if data.numel() else data.sum(dtype=data.dtype).reshape(1)
    before = sum(count(src, line.rank) for src in range(line.rank))
    return line.send(messages, lambda src, dst: own if src == dst else count(src, dst)), slice(before, before + own)


def _message(parts: Sequence[torch.Tensor], like: Sequence[Held]) -> torch.Tensor:
    if not parts:
        return like[0].blocks[0].data.new_empty(0)
    return torch.cat([part.reshape(-1) for part in parts]) if len(parts) > 1 else parts[0].reshape(-1)


def _slab(halo: Halo, part: Interval) -> Box:
    return (*halo.box[: halo.axis], part, *halo.box[halo.axis + 1 :])


def _shape(dims: tuple[int, ...], shape: torch.Size, box: Box) -> torch.Size:
    """Of a box of a tensor whose blocks have this shape but for the split dimensions."""
    sizes = list(shape)
    for dim, side in zip(dims, box, strict=True):
        sizes[dim] = side.size
    return torch.Size(sizes)
