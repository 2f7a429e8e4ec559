"""What the halos add to the border of a tile's convolution, tap by tap.

Convolution is linear, so what a rank makes of its own values alone lacks only what the halos add. Along a split
dimension each tap of the kernel pairs a few planes of the halo with as many of the tile, and one such tap is a
convolution with a dimension less, of which the planes are samples. That is all the arithmetic the border needs; to
compute its rows anew, with all taps, is several times as much, and kernels are slow on blocks of few rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from ..comm import Held
from ..geometry import Box, Tap, slabs
from .conv_local import LocalConvolution
from .tiling import Fetch

FEWEST_CHANNELS = 8


def pays(weight: torch.Tensor) -> bool:
    """Whether a tap is work enough for a call of its own; and sums in half precision are not rounded twice."""
    return weight.shape[1] >= FEWEST_CHANNELS and weight.dtype in (torch.float32, torch.float64)


@dataclass(frozen=True)
class Meeting:
    """The planes of a halo and of a tile that one tap brings together, along one of the split dimensions."""

    local: LocalConvolution
    held: Held  # the fetched side, as far as it is there
    halo: Box
    number: int  # of the split dimension
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
        """[N C .. n ..] -> [N*n C .. ..]; a sole spatial dimension is left with size 1."""
        planes = block.movedim(self.dim, 1).flatten(0, 1)
        return planes if planes.dim() > 2 else planes.unsqueeze(2)

    def _add(self, place: torch.Tensor, planes: torch.Tensor) -> None:
        planes = planes if place.dim() > 3 else planes.squeeze(2)
        place.add_(planes.unflatten(0, (place.shape[0], place.shape[self.dim])).movedim(1, self.dim))


def meetings(local: LocalConvolution, fetch: Fetch, fetches_fine: bool) -> Iterator[Meeting]:
    """All there are, of each split dimension as soon as its halos are there: those of the next one travel meanwhile."""
    tiling = local.tiling
    inside = tuple(own & needed for own, needed in zip(fetch.own_box, fetch.needed, strict=True))
    for number, halos in enumerate(slabs(fetch.needed, inside)):
        fetch.advance()
        window = tiling.splits[number].window
        for halo in halos:
            fine = halo[number] if fetches_fine else tiling.fine[number]
            coarse = tiling.coarse[number] if fetches_fine else halo[number]
            for tap in window.taps(fine, coarse):
                yield Meeting(local, fetch.held, halo, number, tap)


def add_output(local: LocalConvolution, result: torch.Tensor, fetch: Fetch, weight: torch.Tensor) -> torch.Tensor:
    """Complete, in place, what was computed of the tile alone: from coarse to fine if it is transposed."""
    for meeting in meetings(local, fetch, fetches_fine=not local.conv.transposed):
        if local.conv.transposed:
            _add_fine(meeting, result, weight)
        else:
            _add_coarse(meeting, result, weight)
    return result


def add_gradients(
    local: LocalConvolution, own: torch.Tensor, gx: torch.Tensor | None, gw: torch.Tensor | None, fetch: Fetch,
    fetches_fine: bool, weight: torch.Tensor,
) -> None:  # fmt: skip
    """The same for the gradients of input and weight; `own` is the tile's side that is not fetched."""
    for meeting in meetings(local, fetch, fetches_fine):
        if gx is not None:
            (_add_coarse if fetches_fine else _add_fine)(meeting, gx, weight)
        if gw is not None:
            blocks = _met_by_fine(meeting, own) if fetches_fine else _met_by_coarse(meeting, own)
            meeting.kernel(gw).add_(meeting.others.weight_gradient(*blocks, meeting.kernel(weight)))


def _add_coarse(meeting: Meeting, result: torch.Tensor, weight: torch.Tensor) -> None:
    """What the fine halo adds to the tile's coarse side."""
    tiling = meeting.local.tiling
    halo = meeting.fine_planes(meeting.held.read(meeting.at_fine(tiling.reads(tiling.coarse))))
    place = Held.own(result, tiling.dims, tiling.coarse).read(meeting.at_coarse(tiling.coarse))
    meeting.add_to_coarse(place, meeting.others.down(halo, meeting.kernel(weight), None))


def _add_fine(meeting: Meeting, result: torch.Tensor, weight: torch.Tensor) -> None:
    """What the coarse halo adds to the tile's fine side."""
    tiling = meeting.local.tiling
    halo = meeting.coarse_planes(meeting.held.read(meeting.at_coarse(tiling.coarse_for(tiling.fine))))
    place = Held.own(result, tiling.dims, tiling.fine).read(meeting.at_fine(tiling.fine))
    box = meeting.without(tiling.fine)
    meeting.add_to_fine(place, meeting.others.up(halo, meeting.kernel(weight), None, box))


def _met_by_fine(meeting: Meeting, own: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The planes of the fine halo and those of the tile's own coarse side with which they make weight gradients."""
    tiling = meeting.local.tiling
    reading = tuple(a & b for a, b in zip(tiling.coarse_for(meeting.halo), tiling.coarse, strict=True))
    halo = meeting.held.read(meeting.at_fine(tiling.reads(reading)), within=meeting.halo)
    beside = Held.own(own, tiling.dims, tiling.coarse).read(meeting.at_coarse(reading))
    return meeting.fine_planes(halo), meeting.coarse_planes(beside)


def _met_by_coarse(meeting: Meeting, own: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The planes of the tile's own fine side and those of the coarse halo."""
    tiling = meeting.local.tiling
    halo = meeting.held.read(meeting.at_coarse(meeting.halo))
    beside = Held.own(own, tiling.dims, tiling.fine).read(meeting.at_fine(tiling.reads(meeting.halo)))
    return meeting.fine_planes(beside), meeting.coarse_planes(halo)
