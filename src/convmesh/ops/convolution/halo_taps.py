"""What the halos add to the border of a tile's convolution, tap by tap.

Convolution is linear, so what a rank computes of its own values alone lacks only what the halos add. Along a sharded
dimension each tap of the kernel pairs a few planes of the halo with as many of the tile, and one such tap is a
convolution with a dimension less, of which the planes are samples. That is all the arithmetic the border needs; to
compute its rows anew, with all taps, is several times as much, and kernels are slow on blocks of few rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from ...comm import Held
from ...geometry import Box, Tap
from .._core.tiles import Fetch
from ..reductions.plan import wide
from .local import LocalConvolution

FEWEST_CHANNELS = 8


def pays(weight: torch.Tensor) -> bool:
    """Whether a tap is work enough for a call of its own; and sums in half precision are not rounded twice."""
    return weight.shape[1] >= FEWEST_CHANNELS and weight.dtype in (torch.float32, torch.float64)


def widened(*tensors: Any) -> list[Any]:
    """In a type in which they may be added up tap by tap; None stays None."""
    return [None if tensor is None else tensor.to(wide(tensor.dtype)) for tensor in tensors]


@dataclass(frozen=True)
class Border:
    """A convolution where one tap brings planes of a halo and of the tile together."""

    local: LocalConvolution
    held: Held  # the fetched side, as far as it is there
    number: int  # of the sharded dimension
    halo: Box
    tap: Tap

    @property
    def dim(self) -> int:
        return self.local.tiling.dims[self.number]

    def kernel(self, weight: torch.Tensor) -> torch.Tensor:
        """The weight of this tap, or in the weight's gradient the place for it."""
        chosen = weight.select(self.dim, self.tap.index)
        return chosen if weight.dim() > 3 else chosen.unsqueeze(2)

    def at_coarse(self, box: Box) -> Box:
        return (*box[: self.number], self.tap.coarse, *box[self.number + 1 :])

    def at_fine(self, box: Box) -> Box:
        return (*box[: self.number], self.tap.fine, *box[self.number + 1 :])

    def fine_planes(self, block: torch.Tensor) -> torch.Tensor:
        return self._planes(self._spaced(block))

    def coarse_planes(self, block: torch.Tensor) -> torch.Tensor:
        return self._planes(block)

    def add_to_fine(self, place: torch.Tensor, planes: torch.Tensor) -> None:
        self._add(self._spaced(place), planes)

    def add_to_coarse(self, place: torch.Tensor, planes: torch.Tensor) -> None:
        self._add(place, planes)

    @property
    def others(self) -> LocalConvolution:
        """The convolution along all other dimensions."""
        return self.local.planes[self.number]

    def without(self, box: Box) -> Box:
        return (*box[: self.number], *box[self.number + 1 :])

    def _spaced(self, block: torch.Tensor) -> torch.Tensor:
        """Of consecutive fine planes those that the tap reads."""
        step = self.tap.step
        return block if step == 1 else block[(*[slice(None)] * self.dim, slice(None, None, step))]

    def _planes(self, block: torch.Tensor) -> torch.Tensor:
        """[N C .. n ..] -> [N*n C .. ..], wide; a sole spatial dimension is left with size 1."""
        planes = block.to(wide(block.dtype)).movedim(self.dim, 1).flatten(0, 1)
        return planes if planes.dim() > 2 else planes.unsqueeze(2)

    def _add(self, place: torch.Tensor, planes: torch.Tensor) -> None:
        planes = planes if place.dim() > 3 else planes.squeeze(2)
        place.add_(planes.unflatten(0, (place.shape[0], place.shape[self.dim])).movedim(1, self.dim))


def borders(local: LocalConvolution, fetch: Fetch, fetches_fine: bool) -> Iterator[Border]:
    """All there are, of each sharded dimension as soon as its halos are there; the next one's are under way then."""
    for meetings in local.tiling.met_by_fine_halos if fetches_fine else local.tiling.met_by_coarse_halos:
        fetch.advance()
        for meeting in meetings:
            yield Border(local, fetch.held, *meeting)


def add_output(local: LocalConvolution, result: torch.Tensor, fetch: Fetch, weight: torch.Tensor) -> torch.Tensor:
    """Complete, in place, what was computed of the tile alone: from coarse to fine if it is transposed."""
    for border in borders(local, fetch, fetches_fine=not local.conv.transposed):
        if local.conv.transposed:
            _add_fine(border, result, weight)
        else:
            _add_coarse(border, result, weight)
    return result


def add_gradients(
    local: LocalConvolution, own: torch.Tensor, gx: torch.Tensor | None, gw: torch.Tensor | None, fetch: Fetch,
    fetches_fine: bool, weight: torch.Tensor,
) -> None:  # fmt: skip
    """The same for the gradients of input and weight; `own` is the tile's side that is not fetched."""
    for border in borders(local, fetch, fetches_fine):
        if gx is not None:
            (_add_coarse if fetches_fine else _add_fine)(border, gx, weight)
        if gw is not None:
            blocks = _met_by_fine(border, own) if fetches_fine else _met_by_coarse(border, own)
            border.kernel(gw).add_(border.others.weight_gradient(*blocks, border.kernel(weight)))


def _add_coarse(border: Border, result: torch.Tensor, weight: torch.Tensor) -> None:
    """What the fine halo adds to the tile's coarse side."""
    tiling = border.local.tiling
    halo = border.fine_planes(border.held.read(border.at_fine(tiling.sources_read)))
    place = Held.own(result, tiling.dims, tiling.targets).read(border.at_coarse(tiling.targets))
    border.add_to_coarse(place, border.others.down(halo, border.kernel(weight), None))


def _add_fine(border: Border, result: torch.Tensor, weight: torch.Tensor) -> None:
    """What the coarse halo adds to the tile's fine side."""
    tiling = border.local.tiling
    halo = border.coarse_planes(border.held.read(border.at_coarse(tiling.readers)))
    place = Held.own(result, tiling.dims, tiling.sources).read(border.at_fine(tiling.sources))
    box = border.without(tiling.sources)
    border.add_to_fine(place, border.others.up(halo, border.kernel(weight), None, box))


def _met_by_fine(border: Border, own: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The planes of the fine halo and those of the tile's own coarse side with which they make weight gradients."""
    tiling = border.local.tiling
    reading = tuple(a & b for a, b in zip(tiling.read_by(border.halo), tiling.targets, strict=True))
    halo = border.held.read(border.at_fine(tiling.reads(reading)), within=border.halo)
    beside = Held.own(own, tiling.dims, tiling.targets).read(border.at_coarse(reading))
    return border.fine_planes(halo), border.coarse_planes(beside)


def _met_by_coarse(border: Border, own: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The planes of the tile's own fine side and those of the coarse halo."""
    tiling = border.local.tiling
    halo = border.held.read(border.at_coarse(border.halo))
    beside = Held.own(own, tiling.dims, tiling.sources).read(border.at_fine(tiling.reads(border.halo)))
    return border.fine_planes(beside), border.coarse_planes(halo)
