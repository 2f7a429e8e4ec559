"""The layers of a network on a mesh: what a rank reads of its neighbours, and the least communication for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from math import prod
from typing import Any

from torch import nn

from ..geometry import Box, HaloPlan, Interval, ShardedDependence, Window, volume
from .settings import Shape

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)


@dataclass(frozen=True)
class ConvolutionHalos:
    """Input and output of a convolution whose first two spatial dimensions are sharded over the mesh."""

    along: tuple[ShardedDependence, ShardedDependence]  # along height and width
    transposed: bool
    input: tuple[int, ...]
    output: tuple[int, ...]
    learns_input: bool  # whether the input needs a gradient (the picture does not)

    def reads(self, place: Sequence[int]) -> Box:
        """The box of the input that the rank at `place` of the mesh reads, without the padding."""
        return _needed(self._plans(self.transposed), place)

    def owns(self, place: Sequence[int]) -> Box:
        """The box of the input that the rank at `place` of the mesh owns."""
        return tuple(plan.owned[rank] for plan, rank in zip(self._plans(self.transposed), place, strict=True))

    def least_bytes(self, element_size: int) -> int:
        """The least number of bytes that all ranks together have to send in a step.

        Forward, each rank needs the part of the input that it reads and does not own; backward, the same of the
        output's gradient, for the gradient of the input. The gradient of the weight then needs nothing more. Where only
        the weight's gradient is wanted, one of the two must be sent, the smaller one, if the forward halo was not kept.
        """
        forward = _halo_pixels(self._plans(self.transposed)) * _elements_per_pixel(self.input)
        backward = _halo_pixels(self._plans(not self.transposed)) * _elements_per_pixel(self.output)
        return (forward + (backward if self.learns_input else min(forward, backward))) * element_size

    def _plans(self, coarse: bool) -> list[HaloPlan]:
        """The halo plans of the fine (`coarse=False`) or the coarse side of the windows."""
        return [side.target_plan if coarse else side.source_plan for side in self.along]


def convolution_halos(
    module: nn.Module, input: Sequence[int], output: Sequence[int], learns: bool, mesh: Shape
) -> ConvolutionHalos | None:
    """Return the `ConvolutionHalos` of a convolution, None for any other layer."""
    transposed = isinstance(module, TRANSPOSED)
    if not transposed and not isinstance(module, CONVOLUTIONS):
        return None
    options: Any = module
    fine, coarse = (output, input) if transposed else (input, output)

    def along(dim: int) -> ShardedDependence:
        window = Window(options.kernel_size[dim], options.stride[dim], options.padding[dim], options.dilation[dim])
        return ShardedDependence(window, fine[2 + dim], coarse[2 + dim], (mesh[dim],))

    return ConvolutionHalos((along(0), along(1)), transposed, tuple(input), tuple(output), learns)


def _needed(plans: Sequence[HaloPlan], place: Sequence[int]) -> Box:
    """The box that the rank at `place` needs, without overhangs."""
    sides = []
    for plan, rank in zip(plans, place, strict=True):
        (needed,) = plan.needed.parts(rank)
        sides.append(needed & Interval(0, plan.size))
    return tuple(sides)


def _halo_pixels(plans: Sequence[HaloPlan]) -> int:
    """How many pixels all ranks together read that other ranks own."""
    total = 0
    for place in product(*(range(len(plan.owned)) for plan in plans)):
        needed = _needed(plans, place)
        own = [plan.owned[rank] for plan, rank in zip(plans, place, strict=True)]
        total += volume(needed) - volume([a & b for a, b in zip(needed, own, strict=True)])
    return total


def _elements_per_pixel(shape: Sequence[int]) -> int:
    """The number of elements per pixel: samples x channels x further dimensions, which are not sharded."""
    return prod(shape) // (shape[2] * shape[3])
