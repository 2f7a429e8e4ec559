"""A windowed dimension that is cut over a line of ranks: both of its sides, and what each rank reads of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from .halo_plan import HaloPlan
from .interval import Interval, shards
from .window import Window

Box = tuple[Interval, ...]


@dataclass(frozen=True)
class Split:
    """Both sides of a window are cut over the same ranks, each in the layout of its own size."""

    window: Window
    fine_size: int
    coarse_size: int
    mesh_sizes: tuple[int, ...]

    @cached_property
    def fine(self) -> tuple[Interval, ...]:
        return shards(self.fine_size, self.mesh_sizes)

    @cached_property
    def coarse(self) -> tuple[Interval, ...]:
        return shards(self.coarse_size, self.mesh_sizes)

    @cached_property
    def fine_plan(self) -> HaloPlan:
        """Each rank produces its coarse part, and needs what that reads; this overhangs where the input is padded."""
        return HaloPlan(self.fine_size, self.fine, tuple(map(self.window.parts_read, self.coarse)))

    @cached_property
    def coarse_plan(self) -> HaloPlan:
        """Each rank produces its fine part, and needs the coarse indices that read it."""
        whole = Interval(0, self.coarse_size)
        readers = [self.window.parts_read_by(part) for part in self.fine]
        return HaloPlan(
            self.coarse_size, self.coarse, tuple(tuple(part & whole for part in parts) for parts in readers)
        )

    def coarse_for(self, fine: Interval) -> Interval:
        return self.window.read_by(fine) & Interval(0, self.coarse_size)

    def own_padding(self, rank: int) -> int | None:
        """The padding with which the operator takes exactly this rank's fine part to its coarse part, if there is one.

        The results are right inside (`inner_coarse`, `inner_fine`), and lack what other ranks own at the border.
        """
        fine, coarse, window = self.fine[rank], self.coarse[rank], self.window
        padding = fine.start + window.padding - coarse.start * window.stride
        if not fine or not coarse or padding < 0:
            return None
        local = Window(window.kernel, window.stride, padding, window.dilation)
        return padding if local.coarse_size(len(fine)) == len(coarse) else None

    def inner_coarse(self, rank: int) -> Interval:
        """The part of this rank's coarse indices that reads nothing of other ranks."""
        own, fine, window = self.coarse[rank], self.fine[rank], self.window
        start, stop = own.start, own.stop
        if fine.start > 0:
            start = -(-(fine.start + window.padding) // window.stride)
        if fine.stop < self.fine_size:
            stop = (fine.stop - window.extent + window.padding) // window.stride + 1
        return own & Interval(start, stop)

    def inner_fine(self, rank: int) -> Interval:
        """The part of this rank's fine indices that no coarse index of other ranks reads."""
        own, coarse, window = self.fine[rank], self.coarse[rank], self.window
        start, stop = own.start, own.stop
        if coarse.start > 0:
            start = (coarse.start - 1) * window.stride - window.padding + window.extent
        if coarse.stop < self.coarse_size:
            stop = coarse.stop * window.stride - window.padding
        return own & Interval(start, stop)


def slabs(outer: Box, inner: Box) -> list[list[Box]]:
    """Cut `outer` without `inner` into boxes, for each dimension those before and behind `inner` along it.

    A dimension's slabs are as wide as `outer` along the dimensions before it and as `inner` along those after it.
    So the slabs of a dimension need only what the exchanges up to that dimension brought, and none overlap.
    """
    cut: list[list[Box]] = []
    for dim, (whole, core) in enumerate(zip(outer, inner, strict=True)):
        ends = [Interval(whole.start, core.start), Interval(core.stop, whole.stop)]
        around = [(*outer[:dim], end, *inner[dim + 1 :]) for end in ends]
        cut.append([box for box in around if volume(box)])
    return cut


def volume(box: Sequence[Interval]) -> int:
    result = 1
    for side in box:
        result *= side.size
    return result
