"""The one exchange of the library: halos travel to who needs them; its adjoint brings their gradients back.

A collective is started by `start` and awaited by `finish`, so that work can go on in between.
Everything that is sent along one line of ranks at one time travels in one message a pair of ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from .. import _torch
from ..geometry import Box, HaloPlan, Interval
from .held import Block, Held
from .line import Line


@dataclass(frozen=True)
class Halo:
    """What travels of one tensor along its split dimension number `axis`, by `plan`.

    `box` is what the rank must hold in the end, clipped to the tensor: the same along the other axes on a whole line.
    """

    axis: int
    plan: HaloPlan
    box: Box


class Pending:
    """An exchange under way."""

    def __init__(self, received: torch.Tensor | None, layout: Sequence[tuple[int, Box, torch.Size]], jobs: int):
        self._received, self._layout, self._jobs = received, layout, jobs

    @property
    def received(self) -> torch.Tensor | None:
        """All that came in, for `_torch.tie`."""
        return None if self._received is None else _torch.wait(self._received)

    def finish(self) -> list[list[Block]]:
        """For every tensor that was given to `start`, the blocks that came in for it."""
        blocks: list[list[Block]] = [[] for _ in range(self._jobs)]
        if self._received is None:
            return blocks
        parts = _torch.wait(self._received).split([shape.numel() for _, _, shape in self._layout])
        for (job, box, shape), part in zip(self._layout, parts, strict=True):
            blocks[job].append(Block(box, part.view(shape)))
        return blocks


def start(held: Sequence[Held], halos: Sequence[Halo], line: Line) -> Pending:
    """Send along `line` what others need of each of `held`. All ranks of the line call this, or none does."""
    jobs = list(zip(held, halos, strict=True))
    if all(halo.plan.silent for halo in halos):
        return Pending(None, (), len(jobs))

    def count(src: int, dst: int) -> int:
        return sum(
            _shape(own, _slab(halo, part)).numel() for own, halo in jobs for part in halo.plan.transfer(src, dst)
        )

    messages = [
        _message(
            [own.read(_slab(halo, part)) for own, halo in jobs for part in halo.plan.transfer(line.rank, dst)], held
        )
        for dst in range(line.size)
    ]
    layout = [
        (job, _slab(halo, part), _shape(own, _slab(halo, part)))
        for src in range(line.size)
        for job, (own, halo) in enumerate(jobs)
        for part in halo.plan.transfer(src, line.rank)
    ]
    return Pending(line.send(messages, count), layout, len(jobs))


def give_back(gradients: Held, dim: int, plan: HaloPlan, line: Line) -> torch.Tensor:
    """The adjoint of `start` along the one split dimension `dim`: owners add up what was made of what they sent.

    `gradients` has a block for every index that this rank needed, also of those that it owns.
    """
    own = plan.owned[line.rank]
    total = gradients.read((own,)).clone()
    if plan.silent:
        return total

    def count(src: int, dst: int) -> int:
        return sum(_shape(gradients, (part,)).numel() for part in plan.transfer(dst, src))

    messages = [
        _message([gradients.read((part,)) for part in plan.transfer(owner, line.rank)], [gradients])
        for owner in range(line.size)
    ]
    received = _torch.wait(line.send(messages, count))
    places = [total.narrow(dim, part.start - own.start, len(part)) for _, part in plan.sends(line.rank)]
    for place, part in zip(places, received.split([place.numel() for place in places]), strict=True):
        place.add_(part.view(place.shape))
    return _torch.tie(total, received, *(block.data for block in gradients.blocks))


def _message(parts: Sequence[torch.Tensor], like: Sequence[Held]) -> torch.Tensor:
    if not parts:
        return like[0].blocks[0].data.new_empty(0)
    return torch.cat([part.reshape(-1) for part in parts]) if len(parts) > 1 else parts[0].reshape(-1)


def _slab(halo: Halo, part: Interval) -> Box:
    return (*halo.box[: halo.axis], part, *halo.box[halo.axis + 1 :])


def _shape(held: Held, box: Box) -> torch.Size:
    shape = list(held.blocks[0].data.shape)
    for dim, side in zip(held.dims, box, strict=True):
        shape[dim] = len(side)
    return torch.Size(shape)
