"""What windowed operators share: this rank's tile of both sides, and producing one side from the other.

A tile's own part is computed while the halos travel; the border strips that need a halo are computed when it is there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import NamedTuple, Protocol

import torch

from ... import _torch
from ...comm import Halo, Held, Line, Pending, start
from ...geometry import Box, HaloPlan, Interval, Split, Tap, hull, slabs, volume

# Strips cost more per element than the whole does. Where the border is more than this part of the tile,
# it is cheaper to put tile and halos together first (measured: benchmarks, small shards).
LARGEST_BORDER = 0.25


class Meeting(NamedTuple):
    """Planes of a halo and of the tile that one tap brings together, along one of the split dimensions."""

    number: int  # of that dimension
    halo: Box
    tap: Tap


@dataclass(frozen=True)
class Tiling:
    """The split dimensions of a windowed operator, and where this rank stands along each."""

    dims: tuple[int, ...]
    splits: tuple[Split, ...]
    lines: tuple[Line, ...]

    @cached_property
    def fine(self) -> Box:
        return tuple(split.fine[line.rank] for split, line in self._pairs)

    @cached_property
    def coarse(self) -> Box:
        return tuple(split.coarse[line.rank] for split, line in self._pairs)

    @cached_property
    def inner_fine(self) -> Box:
        return tuple(split.inner_fine(line.rank) for split, line in self._pairs)

    @cached_property
    def inner_coarse(self) -> Box:
        return tuple(split.inner_coarse(line.rank) for split, line in self._pairs)

    @cached_property
    def own_padding(self) -> dict[int, int] | None:
        """By dimension, the padding with which the operator maps this tile's own sides onto each other, if it can."""
        paddings = {
            dim: split.own_padding(line.rank) for dim, (split, line) in zip(self.dims, self._pairs, strict=True)
        }
        known = {dim: padding for dim, padding in paddings.items() if padding is not None}
        return known if len(known) == len(paddings) else None

    @cached_property
    def computes_own(self) -> bool:
        """The tile's own part is computed while the halos travel, and only its border waits for them."""
        sides = ((self.fine, self.inner_fine), (self.coarse, self.inner_coarse))
        inner = min(volume(inside) / max(1, volume(own)) for own, inside in sides)
        return self.own_padding is not None and 1 - inner <= LARGEST_BORDER

    @cached_property
    def reaches_far(self) -> bool:
        """Dilated windows reach beyond the tile by more than its size, most of it gaps and padding: tile and halos are
        never put together then."""
        far = (
            split.window.dilation > 1 and reach > 2 * size
            for split, (reach, size) in zip(self.splits, self._reaches, strict=True)
        )
        return self.own_padding is not None and any(far)

    @cached_property
    def _reaches(self) -> list[tuple[int, int]]:
        """Along each split dimension, how much of the fine side is read by all that read of the tile, and the tile."""
        sides = zip(self.splits, self.fine, strict=True)
        return [(len(split.window.reads(split.coarse_for(side))), len(side)) for split, side in sides]

    def reads(self, coarse: Box) -> Box:
        """The fine box that a coarse box reads; overhangs where the input is padded."""
        return tuple(split.window.reads(side) for split, side in zip(self.splits, coarse, strict=True))

    def coarse_for(self, fine: Box) -> Box:
        """The coarse box that reads a fine box."""
        return tuple(split.coarse_for(side) for split, side in zip(self.splits, fine, strict=True))

    def fetch_fine(self, own: torch.Tensor) -> Fetch:
        """Begin to collect what this tile's coarse side reads."""
        return Fetch(self, [split.fine_plan for split in self.splits], self.fine, own)

    def fetch_coarse(self, own: torch.Tensor) -> Fetch:
        """Begin to collect the coarse indices that read this tile's fine side."""
        return Fetch(self, [split.coarse_plan for split in self.splits], self.coarse, own)

    @cached_property
    def met_by_fine_halos(self) -> tuple[tuple[Meeting, ...], ...]:
        """For each split dimension, how its halos of the fine side meet the tile's own coarse side."""
        halos = self._halos([split.fine_plan for split in self.splits], self.fine)
        return self._meetings(halos, lambda halo, number: (halo[number], self.coarse[number]))

    @cached_property
    def met_by_coarse_halos(self) -> tuple[tuple[Meeting, ...], ...]:
        """The same of the coarse side's halos and the tile's own fine side."""
        halos = self._halos([split.coarse_plan for split in self.splits], self.coarse)
        return self._meetings(halos, lambda halo, number: (self.fine[number], halo[number]))

    def _halos(self, plans: list[HaloPlan], own_box: Box) -> list[list[Box]]:
        needed = needed_here(plans, self.lines)
        return slabs(needed, tuple(own & side for own, side in zip(own_box, needed, strict=True)))

    def _meetings(
        self, halos: list[list[Box]], sides: Callable[[Box, int], tuple[Interval, Interval]]
    ) -> tuple[tuple[Meeting, ...], ...]:
        return tuple(
            tuple(
                Meeting(number, halo, piece)
                for halo in around
                for tap in split.window.taps(*sides(halo, number))
                for piece in tap.pieces(self._most_planes(number))
            )
            for number, (split, around) in enumerate(zip(self.splits, halos, strict=True))
        )

    def _most_planes(self, number: int) -> int:
        """So many planes across a split dimension are no more than the tile, even with what far windows read around."""
        widest = prod(reach for other, (reach, _) in enumerate(self._reaches) if other != number)
        return max(1, volume(self.fine) // widest) if self.reaches_far else self.splits[number].coarse_size

    def without(self, number: int) -> Tiling:
        """Of a plane across one of the split dimensions, which has a dimension less."""
        gone = self.dims[number]
        others = [other for other in range(len(self.dims)) if other != number]
        dims = tuple(self.dims[other] - (self.dims[other] > gone) for other in others)
        return Tiling(dims, tuple(self.splits[other] for other in others), tuple(self.lines[other] for other in others))

    @property
    def _pairs(self) -> list[tuple[Split, Line]]:
        return list(zip(self.splits, self.lines, strict=True))


def needed_here(plans: Sequence[HaloPlan], lines: Sequence[Line]) -> Box:
    """What this rank has to hold along each split dimension, without overhangs: the hull of what it needs."""
    sides = zip(plans, lines, strict=True)
    return tuple(hull(plan.needed[line.rank]) & Interval(0, plan.size) for plan, line in sides)


class Tiles(Protocol):
    """What an exchange has to know of a tiled operator: which dimensions are split, and over which ranks."""

    @property
    def dims(self) -> tuple[int, ...]: ...
    @property
    def lines(self) -> tuple[Line, ...]: ...


class Fetch:
    """The halos of one tensor on their way, a split dimension after the other, which brings the corners too."""

    def __init__(self, tiling: Tiles, plans: list[HaloPlan], own_box: Box, own: torch.Tensor):
        self.own_box = own_box
        self.held = Held.own(own, tiling.dims, own_box)
        self.needed = needed_here(plans, tiling.lines)
        self._plans, self._lines = plans, tiling.lines
        self._received: list[torch.Tensor | None] = []
        self._axis = -1
        self._pending: Pending | None = None
        self._begin_next()

    def advance(self) -> None:
        """Wait for the dimension under way, and send off the next."""
        assert self._pending is not None
        (blocks,) = self._pending.finish()
        self._received.append(self._pending.received)
        self.held = self.held.plus(blocks)
        self._begin_next()

    def complete(self) -> Held:
        while self._pending is not None:
            self.advance()
        return self.held

    def completed(self) -> Fetch:
        self.complete()
        return self

    def tie(self, result: torch.Tensor) -> torch.Tensor:
        """`result`, in a way that keeps the compiler from leaving out an exchange of which this rank uses nothing."""
        self.complete()
        return _torch.tie(result, self.held.blocks[0].data, tokens=self._received)

    def _begin_next(self) -> None:
        self._axis += 1
        axis = self._axis
        if axis == len(self._plans):
            self._pending = None
            return
        box = (*self.needed[:axis], *self.own_box[axis:])
        self._pending = start([self.held], [Halo(axis, self._plans[axis], box)], self._lines[axis])


def patch(
    result: torch.Tensor, fetch: Fetch, target: Box, inner: Box, part: Callable[[Held, Box], torch.Tensor]
) -> torch.Tensor:
    """Put right, in place, what lacks other ranks' values: all of the `target` box but its `inner` part.

    `part(held, box)` computes a box of the result. Strips along one dimension are computed while the halos of the
    next one travel.
    """
    view = Held.own(result, fetch.held.dims, target)
    for strips in slabs(target, inner):
        fetch.advance()
        for strip in strips:
            view.read(strip).copy_(part(fetch.held, strip))
    return result
