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
from . import traffic
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
    if all(halo.plan.silent for halo in halos):
        return Pending(None, (), len(halos))
    sends = [(dst, job, part) for job, halo in enumerate(halos) for dst, part in halo.plan.sends(line.rank)]
    receives = [(src, job, part) for job, halo in enumerate(halos) for src, part in halo.plan.receives(line.rank)]
    outgoing = [(dst, held[job].read(_slab(halos[job], part))) for dst, job, part in sorted(sends, key=_by_rank)]
    layout, incoming = [], []
    for src, job, part in sorted(receives, key=_by_rank):
        box = _slab(halos[job], part)
        shape = _shape(held[job], box)
        layout.append((job, box, shape))
        incoming.append((src, shape.numel()))
    return Pending(_all_to_all(outgoing, incoming, held[0].blocks[0].data, line), layout, len(halos))


def give_back(extended: torch.Tensor, dim: int, halo: Halo, line: Line) -> torch.Tensor:
    """The adjoint of `start`: each rank returns the part of `extended` that it had received, and owners add it up.

    `extended` covers `halo.box`; what comes back covers the same, but along `dim` what this rank owns.
    """
    plan, held = halo.plan, halo.box[halo.axis]
    own = plan.owned[line.rank]
    total = extended.new_zeros([*extended.shape[:dim], len(own), *extended.shape[dim + 1 :]])
    mine = own & held
    if mine:
        total.narrow(dim, mine.start - own.start, len(mine)).copy_(
            extended.narrow(dim, mine.start - held.start, len(mine))
        )
    if plan.silent:
        return total
    outgoing = [
        (src, extended.narrow(dim, part.start - held.start, len(part))) for src, part in plan.receives(line.rank)
    ]
    places = [(dst, total.narrow(dim, part.start - own.start, len(part))) for dst, part in plan.sends(line.rank)]
    received = _all_to_all(outgoing, [(dst, place.numel()) for dst, place in places], extended, line)
    parts = _torch.wait(received).split([place.numel() for _, place in places])
    for (_, place), part in zip(places, parts, strict=True):
        place.add_(part.view(place.shape))
    return total


def _all_to_all(
    outgoing: Sequence[tuple[int, torch.Tensor]], incoming: Sequence[tuple[int, int]], like: torch.Tensor, line: Line
) -> torch.Tensor:
    """One message a pair of ranks: `outgoing` is (destination, data), `incoming` (source, count), in rank order."""
    out_counts, in_counts = [0] * line.size, [0] * line.size
    for dst, data in outgoing:
        out_counts[dst] += data.numel()
    for src, count in incoming:
        in_counts[src] += count
    flat = [data.reshape(-1) for _, data in outgoing]
    buffer = torch.cat(flat) if flat else like.new_empty(0)
    traffic.note(buffer.numel() * buffer.element_size())
    return _torch.all_to_all(buffer, in_counts, out_counts, line.group)


def _slab(halo: Halo, part: Interval) -> Box:
    return (*halo.box[: halo.axis], part, *halo.box[halo.axis + 1 :])


def _shape(held: Held, box: Box) -> torch.Size:
    shape = list(held.blocks[0].data.shape)
    for dim, side in zip(held.dims, box, strict=True):
        shape[dim] = len(side)
    return torch.Size(shape)


def _by_rank(entry: tuple[int, int, Interval]) -> tuple[int, int]:
    return entry[0], entry[1]
