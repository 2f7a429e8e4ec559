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

    def at(self, box: Box, fine: bool) -> Box:
        """A box of the fine or the coarse side, where the tap reads or is read."""
        return (*box[: self.number], self.tap.fine if fine else self.tap.coarse, *box[self.number + 1 :])

    @property
    def others(self) -> LocalConvolution:
        """The convolution along all other dimensions."""
        return self.local.planes[self.number]

    def without(self, box: Box) -> Box:
        return (*box[: self.number], *box[self.number + 1 :])

    def planes(self, block: torch.Tensor, fine: bool) -> torch.Tensor:
        """[N C .. n ..] -> [N*n C .. ..], wide; a sole spatial dimension is left with size 1."""
        planes = self._spaced(block, fine).to(wide(block.dtype)).movedim(self.dim, 1).flatten(0, 1)
        return planes if planes.dim() > 2 else planes.unsqueeze(2)

    def add(self, place: torch.Tensor, planes: torch.Tensor, fine: bool) -> None:
        """The inverse of `planes`, added in place."""
        place = self._spaced(place, fine)
        planes = planes if place.dim() > 3 else planes.squeeze(2)
        place.add_(planes.unflatten(0, (place.shape[0], place.shape[self.dim])).movedim(1, self.dim))

    def _spaced(self, block: torch.Tensor, fine: bool) -> torch.Tensor:
        """Of consecutive fine planes those that the tap reads."""
        step = self.tap.step if fine else 1
        return block if step == 1 else block[(*[slice(None)] * self.dim, slice(None, None, step))]


def borders(local: LocalConvolution, fetch: Fetch, fetches_fine: bool) -> Iterator[Border]:
    """All there are, of each sharded dimension as soon as its halos are there; the next one's are under way then."""
    for meetings in local.tiling.meetings(fetches_fine):
        fetch.advance()
        for meeting in meetings:
            yield Border(local, fetch.held, *meeting)


def add_output(local: LocalConvolution, result: torch.Tensor, fetch: Fetch, weight: torch.Tensor) -> torch.Tensor:
    """Complete, in place, what was computed of the tile alone: from coarse to fine if it is transposed."""
    for border in borders(local, fetch, fetches_fine=not local.conv.transposed):
        _add(border, result, weight, to_fine=local.conv.transposed)
    return result


def add_gradients(
    local: LocalConvolution, own: torch.Tensor, gx: torch.Tensor | None, gw: torch.Tensor | None, fetch: Fetch,
    fetches_fine: bool, weight: torch.Tensor,
) -> None:  # fmt: skip
    """The same for the gradients of input and weight; `own` is the tile's side that is not fetched."""
    for border in borders(local, fetch, fetches_fine):
        if gx is not None:
            _add(border, gx, weight, to_fine=not fetches_fine)
        if gw is not None:
            fine, coarse = local.tiling.pair(border.held, own, border.halo, fetches_fine, border.at)
            planes = border.planes(fine, True), border.planes(coarse, False)
            border.kernel(gw).add_(border.others.weight_gradient(*planes, border.kernel(weight)))


def _add(border: Border, result: torch.Tensor, weight: torch.Tensor, to_fine: bool) -> None:
    """What the halo of the other side adds to the tile's fine or coarse side."""
    tiling, kernel = border.local.tiling, border.kernel(weight)
    box, read = (tiling.sources, tiling.readers) if to_fine else (tiling.targets, tiling.sources_read)
    halo = border.planes(border.held.read(border.at(read, not to_fine)), not to_fine)
    others = border.others
    planes = others.up(halo, kernel, None, border.without(box)) if to_fine else others.down(halo, kernel, None)
    border.add(Held.own(result, tiling.dims, box).read(border.at(box, to_fine)), planes, to_fine)
