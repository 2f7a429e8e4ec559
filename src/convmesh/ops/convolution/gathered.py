"""Convolution of a small tile: put together with its halos first, by an exchange and a copy, and one operator's call.

The operator takes a block of the fetched side to the tile's own other side, or back. A block of the coarse side has
zeros at its ends where the operator's padding, which is alike at both, asks for more than what reads the tile.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from ...comm import HaloBlock
from ...geometry import Convolution, Interval, Window
from ...kernels.convolution import Gradients, bias_gradient, convolution, convolution_backward
from .tile import ConvolutionTiling

# Elements of a tile of which a copy takes less than the operators that add to its border what halos bring.
FEW_ELEMENTS = 2**16


@dataclass(frozen=True)
class Gathered:
    """A block of the fetched side, and the geometry of the operator on it."""

    block: HaloBlock
    conv: Convolution

    @staticmethod
    def of(conv: Convolution, tiling: ConvolutionTiling, fine: bool) -> Gathered | None:
        """With halos of the fine or the coarse side; None where these are no block, or nothing is computed."""
        if not all((*tiling.sources, *tiling.targets)) or tiling.reaches_far:
            return None
        sides = zip(tiling.windows, tiling.sources, tiling.readers, strict=True)
        box = tiling.sources_read if fine else tuple(_taken(*side) for side in sides)
        halos = tiling.source_halos if fine else tiling.target_halos
        # Windows of a coarse block that do not read the tile are none of its readers, and their values are no matter.
        block = halos.block(box, 2 + len(conv.stride), fills=not fine)
        padding, extra = list(conv.padding), list(conv.output_padding)
        for dim, window, own, side in zip(tiling.dims, tiling.windows, tiling.sources, box, strict=True):
            padding[dim - 2] = 0 if fine else _padding(window, own, side)
            extra[dim - 2] = 0
            if conv.transposed and not fine:
                extra[dim - 2] = own.size - _padded(window, padding[dim - 2]).fine_size(side.size)
        if block is None:
            return None
        return Gathered(block, replace(conv, padding=tuple(padding), output_padding=tuple(extra)))

    def output(self, x: torch.Tensor, w: torch.Tensor, b: torch.Tensor | None) -> torch.Tensor:
        """Of an input whose halos are fetched."""
        return convolution(self.block(x), w, b, self.conv)

    def gradients(
        self, gy: torch.Tensor, x: torch.Tensor, w: torch.Tensor, mask: tuple[bool, ...], fetches_output: bool
    ) -> Gradients:
        """With the halos of the output's gradient, or of the input."""
        if not fetches_output:
            return convolution_backward(gy, self.block(x), w, self.conv, mask)
        gx, gw, _ = convolution_backward(self.block(gy), x, w, self.conv, (*mask[:2], False))
        return gx, gw, bias_gradient(gy) if mask[2] else None


def _padded(window: Window, padding: int) -> Window:
    return Window(window.kernel, window.stride, padding, window.dilation)


def _padding(window: Window, fine: Interval, coarse: Interval) -> int:
    """With which the first of `coarse` is the operator's first window on `fine`."""
    return fine.start + window.padding - coarse.start * window.stride


def _taken(window: Window, fine: Interval, readers: Interval) -> Interval:
    """The windows that the operator takes of `fine`, with the least padding at which all `readers` are among them."""
    start = readers.start
    while True:
        padding = _padding(window, fine, Interval(start, start))
        stop = start + _padded(window, padding).coarse_size(fine.size)
        if padding >= 0 and stop >= readers.stop:
            return Interval(start, stop)
        start -= 1
