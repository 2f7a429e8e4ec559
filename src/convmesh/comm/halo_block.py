"""A local tensor with its halos in one contiguous block, by one exchange and one copy per sharded dimension.

It sends the same messages as `start`, but prepared: for small tensors, where the overhead of every Python step and
operator counts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from typing import NamedTuple

import torch

from ..geometry import Box, Interval
from ..strides import memory_format
from .blocks import Held
from .exchange import joined, start
from .schedule import Schedule, Shaped
from .wire import Wire


class View(NamedTuple):
    """The size, stride and offset of a contiguous piece of a receive buffer."""

    size: torch.Size
    stride: tuple[int, ...]
    offset: int


class Prepared(NamedTuple):
    """An exchange for tensors of one shape, with views of what is received before and after the own values."""

    wire: Wire
    before: tuple[View, ...]
    after: tuple[View, ...]
    shape: list[int]  # shape of the result
    sides: View | None  # both pieces to be sent of a contiguous tensor, if they have the same size


class HaloStep:
    """The exchange along one sharded dimension: from what a rank owns of it to what it needs."""

    def __init__(self, schedule: Schedule, dims: tuple[int, ...], axis: int, box: Box, needed: Interval):
        """`box` is what the tensor holds of all sharded dimensions."""
        owned = box[axis]
        own = owned & needed
        self._box = box
        self._schedule, self._dims, self._axis, self._dim = schedule, dims, axis, dims[axis]
        self._kept = None if own == owned else (own.start - owned.start, own.size)
        self._needed, self._own = needed, own
        boxes = [piece.box[axis] for _, piece in schedule.sends]
        self._sends = [(box.start - owned.start, box.size) for box in boxes]
        self._alike = len({size for _, size in self._sends}) == 1
        starts = [start for start, _ in self._sends]
        self._step = starts[1] - starts[0] if len(starts) == 2 and self._alike else 0
        self._prepared: dict[torch.Size, Prepared] = {}

    @property
    def fits(self) -> bool:
        """Whether received pieces and own values join in index order, without gaps, to exactly what is needed."""
        received = [piece.box[self._axis] for _, piece in self._schedule.receives]
        sides = sorted([self._own, *received], key=lambda side: side.start)
        tiled = all(one.stop == other.start for one, other in pairwise(sides))
        return bool(self._own) and tiled and (sides[0].start, sides[-1].stop) == (self._needed.start, self._needed.stop)

    def __call__(self, local: torch.Tensor) -> torch.Tensor:
        if self._schedule.silent:
            return local if self._kept is None else local.narrow(self._dim, *self._kept)
        if type(local) is not torch.Tensor:
            return self._traced(local)
        found = self._prepared.get(local.shape)
        if found is None:
            found = self._prepared[local.shape] = self._prepare(local.shape)
        dense = local.is_contiguous()
        if dense and found.sides is not None:
            size, stride, offset = found.sides
            sides = local.as_strided(size, stride, local.storage_offset() + offset)
            buffer = sides.clone(memory_format=torch.contiguous_format).view(-1)
        else:
            pieces = [local.narrow(self._dim, start, size) for start, size in self._sends]
            buffer = joined(pieces, local, self._alike)
        received = found.wire.exchange(buffer)
        own = local if self._kept is None else local.narrow(self._dim, *self._kept)
        if not found.before and not found.after:
            return own
        parts = [received.as_strided(*view) for view in found.before]
        parts.append(own)
        parts += [received.as_strided(*view) for view in found.after]
        if dense:
            return torch.cat(parts, self._dim)
        block = torch.empty(
            found.shape, dtype=local.dtype, device=local.device, memory_format=memory_format(local)
        )  # fmt: skip
        return torch.cat(parts, self._dim, out=block)

    def _both_sides(self, shape: torch.Size) -> View | None:
        """Return a view of both pieces to be sent of a contiguous tensor of this shape, one after the other."""
        if self._step <= 0:
            return None
        (start, piece), size = self._sends[0], list(shape)
        stride = tuple(prod(shape[dim + 1 :]) for dim in range(len(shape)))
        size[self._dim] = piece
        step = stride[self._dim]
        return View(torch.Size((2, *size)), (self._step * step, *stride), start * step)

    def _traced(self, local: torch.Tensor) -> torch.Tensor:
        """Do the same while tracing: `start` sends tokens by which the compiler orders exchanges."""
        (blocks,) = start(self._schedule, [Held.own(local, self._dims, self._box)]).finish()
        own = local if self._kept is None else local.narrow(self._dim, *self._kept)
        if not blocks:
            return own
        sides = sorted([(self._own.start, own), *((block.box[self._axis].start, block.data) for block in blocks)],
                       key=lambda side: side[0])  # fmt: skip
        return torch.cat([data for _, data in sides], self._dim).contiguous(memory_format=memory_format(local))

    def _prepare(self, shape: torch.Size) -> Prepared:
        wire = self._schedule.wire((Shaped(self._dims, shape),), 0)
        views: dict[bool, list[View]] = {True: [], False: []}
        offset = 0
        for (_, piece), size in zip(self._schedule.receives, wire.shapes, strict=True):
            stride = tuple(prod(size[dim + 1 :]) for dim in range(len(size)))
            views[piece.box[self._axis].start < self._own.start].append(View(size, stride, offset))
            offset += prod(size)
        full = list(shape)
        full[self._dim] = self._needed.size
        return Prepared(wire, tuple(views[True]), tuple(views[False]), full, self._both_sides(shape))


@dataclass(frozen=True, eq=False)
class HaloBlock:
    """Extends a local tensor to a box around it, one dimension after the other, so that corners are included."""

    steps: tuple[HaloStep, ...]
    overhang: list[int]  # padding to be filled around the result, in the format of `constant_pad_nd`; empty for none

    @staticmethod
    def of(
        schedules: Sequence[Schedule], dims: tuple[int, ...], sizes: Sequence[int], owned: Box, needed: Box, box: Box,
        ndim: int, fills: bool = False,
    ) -> HaloBlock | None:  # fmt: skip
        """Prepare the extension to `box`, or return None if the schedules bring something else, or leave gaps.

        Elements of `box` outside of the full tensor are filled; with `fills`, all elements that the schedules do not
        bring, because they are never read.
        """
        for side, size, inside in zip(box, sizes, needed, strict=True):
            if side & inside != inside or not (fills or side & Interval(0, size) == inside):
                return None
        steps = tuple(
            HaloStep(schedule, dims, axis, (*needed[:axis], *owned[axis:]), needed[axis])
            for axis, schedule in enumerate(schedules)
        )
        padding = [0] * (2 * ndim)
        for dim, side, inside in zip(dims, box, needed, strict=True):
            ends = inside.start - side.start, side.stop - inside.stop
            padding[2 * (ndim - 1 - dim) : 2 * (ndim - dim)] = ends
        return HaloBlock(steps, padding if any(padding) else []) if all(step.fits for step in steps) else None

    def __call__(self, local: torch.Tensor, fill: float = 0) -> torch.Tensor:
        for step in self.steps:
            local = step(local)
        if not self.overhang:
            return local
        block: torch.Tensor = torch.ops.aten.constant_pad_nd.default(local, self.overhang, fill)
        return block
