"""A convolution's tile: what of it the operator computes alone, and how halos meet it tap by tap.

The fine side of the windows has the tiling's sources, the coarse side its targets.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from math import prod
from typing import NamedTuple, cast

import torch

from ...comm import Held
from ...geometry import Box, Interval, Tap, Window, slabs, volume
from .._core.tiles import LARGEST_BORDER, Halos, Tiling


class Meeting(NamedTuple):
    """Planes of a halo and of the tile that one tap of the kernel pairs, along one of the sharded dimensions."""

    number: int  # of that dimension
    halo: Box
    tap: Tap


Meetings = tuple[tuple[Meeting, ...], ...]


class ConvolutionTiling(Tiling):
    """The sharded dimensions of a convolution."""

    @cached_property
    def windows(self) -> tuple[Window, ...]:
        return tuple(cast(Window, along.dependence) for along in self.sharded)

    def produced_by(self, transposed: bool) -> tuple[Box, Box]:
        """What this rank owns of a convolution's output, and the part of it that needs no halo."""
        if transposed:
            return self.sources, self.inner_sources
        return self.targets, self.inner_targets

    def pair(
        self, held: Held, own: torch.Tensor, halo: Box, fetches_fine: bool,
        at: Callable[[Box, bool], Box] = lambda box, fine: box,
    ) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
        """The fine and the coarse block that make the weight gradient of a halo of the fetched side with what the tile
        owns of the other one. `at(box, fine)` narrows a box of either side."""
        if not fetches_fine:
            fine = Held.own(own, self.dims, self.sources).read(at(self.reads(halo), True))
            return fine, held.read(at(halo, False))
        reading = tuple(a & b for a, b in zip(self.read_by(halo), self.targets, strict=True))
        coarse = Held.own(own, self.dims, self.targets).read(at(reading, False))
        return held.read(at(self.reads(reading), True), within=halo), coarse

    @cached_property
    def own_padding(self) -> dict[int, int] | None:
        """By dimension, the padding with which the operator maps this tile's own sides onto each other, if it can."""
        sides = zip(self.dims, self.windows, self.sources, self.targets, strict=True)
        paddings = {dim: window.own_padding(fine, coarse) for dim, window, fine, coarse in sides}
        known = {dim: padding for dim, padding in paddings.items() if padding is not None}
        return known if len(known) == len(paddings) else None

    @cached_property
    def computes_own(self) -> bool:
        """The tile alone is computed while its halos are under way, and only its border waits for them."""
        sides = ((self.sources, self.inner_sources), (self.targets, self.inner_targets))
        inner = min(volume(inside) / max(1, volume(own)) for own, inside in sides)
        return self.own_padding is not None and 1 - inner <= LARGEST_BORDER

    @cached_property
    def reaches_far(self) -> bool:
        """Dilated windows reach beyond the tile by more than its size, most of it gaps and padding: tile and halos are
        never put together then."""
        far = (
            window.dilation > 1 and reach > 2 * size
            for window, (reach, size) in zip(self.windows, self._reaches, strict=True)
        )
        return self.own_padding is not None and any(far)

    @cached_property
    def _reaches(self) -> list[tuple[int, int]]:
        """Along each dimension, how many fine indices are read by all that read the tile's, and the tile's."""
        return [(len(read), len(own)) for read, own in zip(self.reads(self.readers), self.sources, strict=True)]

    def meetings(self, fetches_fine: bool) -> Meetings:
        """For each sharded dimension, how halos of the fetched side meet what the tile owns of the other one."""
        return self._met_by_fine_halos if fetches_fine else self._met_by_coarse_halos

    @cached_property
    def _met_by_fine_halos(self) -> Meetings:
        return self._met(self.source_halos, lambda halo, number: (halo, self.targets[number]))

    @cached_property
    def _met_by_coarse_halos(self) -> Meetings:
        return self._met(self.target_halos, lambda halo, number: (self.sources[number], halo))

    def _met(self, fetched: Halos, sides: Callable[[Interval, int], tuple[Interval, Interval]]) -> Meetings:
        inside = tuple(a & b for a, b in zip(fetched.owned, fetched.needed, strict=True))
        halos = slabs(fetched.needed, inside)
        return tuple(
            tuple(
                Meeting(number, halo, piece)
                for halo in around
                for tap in window.taps(*sides(halo[number], number))
                for piece in tap.pieces(self._most_planes(number))
            )
            for number, (window, around) in enumerate(zip(self.windows, halos, strict=True))
        )

    def _most_planes(self, number: int) -> int:
        """So many planes across a dimension are no more than the tile, even with what far windows read around them."""
        widest = prod(reach for other, (reach, _) in enumerate(self._reaches) if other != number)
        return max(1, volume(self.sources) // widest) if self.reaches_far else self.sharded[number].target_size

    def without(self, number: int) -> ConvolutionTiling:
        """Of a plane across one of the sharded dimensions, which has a dimension less."""
        gone = self.dims[number]
        others = [other for other in range(len(self.dims)) if other != number]
        dims = tuple(self.dims[other] - (self.dims[other] > gone) for other in others)
        along = tuple(self.sharded[other] for other in others)
        return ConvolutionTiling(dims, along, tuple(self.lines[other] for other in others))
