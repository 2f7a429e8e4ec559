"""Copying along dimensions by index maps: the common core of padding, slicing, joining and flipping.

Every rank computes its shard of the output, which is sharded by its own size, and fetches what its pieces copy from the
ranks that own it. The adjoint sends gradients the other way and adds them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import product
from math import prod

import torch

from ... import _torch
from ...comm import Block, Halo, Held, RankLine, Schedule, give_back, halo, rank_line, start
from ...geometry import Box, HaloPlan, IndexMap, Interval, Piece, Reads, shards
from ...sharding.layout import Layout, dense_stride
from ...strides import memory_format

Fill = float | int | bool
Boxes = tuple[tuple[Box, ...], ...]  # for each source, the boxes of its blocks
Copy = tuple[int, int, list[Piece]]  # the source, the number of its block, and the piece along each dimension


@dataclass(frozen=True)
class Axis:
    """One mapped dimension: what each rank owns and needs of each source, and which outputs this rank computes."""

    dim: int
    map: IndexMap
    plans: tuple[HaloPlan, ...]
    line: RankLine | None  # None where the dimension is not sharded: then `rank` is 0
    out: Interval

    @property
    def rank(self) -> int:
        return 0 if self.line is None else self.line.rank

    @cached_property
    def schedule(self) -> Schedule:
        """The exchange of the first source along this dimension alone."""
        assert self.line is not None
        return halo(self.line, Halo(0, self.plans[0], (Interval(0, self.plans[0].size),)))


@dataclass(frozen=True)
class Exchange:
    """One exchange for several sources, or for several boxes of one source."""

    sources: tuple[int, ...]
    schedule: Schedule


@dataclass(frozen=True)
class DistributedCopy:
    """This rank's part of a copy along some dimensions."""

    axes: tuple[Axis, ...]

    @staticmethod
    def of(layout: Layout, maps: Mapping[int, IndexMap], sizes: Sequence[int] | None = None) -> DistributedCopy:
        """Plan a copy by `maps` (tensor dimension -> index map) for tensors that are sharded like `layout`.

        Sources and output have the same placements. There is one source, of `layout`'s shape; with `sizes` there are
        several, with these sizes along the one dimension that is mapped.
        """
        axes = []
        for dim, index_map in maps.items():
            mesh_dims = tuple(m for m in layout.sharded_dims.get(dim, ()) if layout.mesh.size(m) > 1)
            mesh_sizes = tuple(layout.mesh.size(m) for m in mesh_dims)
            outs = shards(index_map.size, mesh_sizes)
            plans = tuple(
                HaloPlan(
                    shards(size, mesh_sizes),
                    Reads(outs, partial(index_map.reads, source=source), partial(index_map.read_by, source=source)),
                )
                for source, size in enumerate(sizes if sizes is not None else [layout.shape[dim]])
            )
            line = rank_line(layout.mesh, mesh_dims) if prod(mesh_sizes) > 1 else None
            axes.append(Axis(dim, index_map, plans, line, outs[0 if line is None else line.rank]))
        return DistributedCopy(tuple(axes))

    @property
    def dims(self) -> tuple[int, ...]:
        return tuple(axis.dim for axis in self.axes)

    def __call__(self, sources: Sequence[torch.Tensor], fill: Fill = 0) -> torch.Tensor:
        """Return this rank's part of the output: always a new tensor, into which every element is copied once."""
        held = [Held.own(source, self.dims, self._own(number)) for number, source in enumerate(sources)]
        result = self._allocate(sources[0], fill)
        written = 0  # how many blocks of each source are copied already
        # One dimension after the other, so that corners are fetched too.
        for number, axis in enumerate(self.axes):
            if axis.line is None:
                continue
            exchange = self._exchange(number, len(sources))
            pending = start(exchange.schedule, [held[source] for source in exchange.sources])
            if not written and self._disjoint:  # copy this rank's own values while messages are in flight
                written = 1
                self._write(result, held, slice(0, written))
            for source, blocks in zip(exchange.sources, pending.finish(), strict=True):
                held[source] = held[source].plus(blocks)
        self._write(result, held, slice(written, None))
        return _torch.tie(result, *sources)

    @cached_property
    def _disjoint(self) -> bool:
        """Whether no two pieces write to the same outputs, so that they can be written in any order."""
        return all(axis.map.disjoint for axis in self.axes)

    @cached_property
    def _known_exchanges(self) -> dict[tuple[int, int], Exchange]:
        """Exchanges by (axis, number of sources): planned in the first call and reused in all others."""
        return {}

    @cached_property
    def _known_copies(self) -> dict[Boxes, list[Copy]]:
        """Copies by the boxes of the blocks that are held: planned in the first call and reused in all others."""
        return {}

    def _own(self, source: int) -> Box:
        """The box of a source that this rank owns."""
        return tuple(axis.plans[source].owned[axis.rank] for axis in self.axes)

    def _allocate(self, model: torch.Tensor, fill: Fill) -> torch.Tensor:
        """Allocate this rank's part of the output, filled where nothing is copied to."""
        shape = list(model.shape)
        for axis in self.axes:
            shape[axis.dim] = axis.out.size
        # A new tensor of the model's type: a compiler replays this on a fake tensor without being in fake mode.
        result = model.new_empty_strided(shape, dense_stride(tuple(shape), memory_format(model)))
        for dim, at, length in self._gaps:
            result.narrow(dim, at, length).fill_(fill)
        return result

    @cached_property
    def _gaps(self) -> list[tuple[int, int, int]]:
        """(dimension, start, length) of each range that no piece copies to."""
        return [
            (axis.dim, gap.start - axis.out.start, gap.size) for axis in self.axes for gap in axis.map.gaps(axis.out)
        ]

    def _exchange(self, number: int, sources: int) -> Exchange:
        """Return the exchange along one axis, which includes what was received along the axes before it."""
        if (number, sources) in self._known_exchanges:
            return self._known_exchanges[number, sources]
        line = self.axes[number].line
        assert line is not None
        halos = [
            (source, Halo(number, self.axes[number].plans[source], (*before, *self._own(source)[number:])))
            for source in range(sources)
            for before in product(*(done.plans[source].needed.parts(done.rank) for done in self.axes[:number]))
        ]
        exchange = Exchange(tuple(source for source, _ in halos), halo(line, *(one for _, one in halos)))
        return self._known_exchanges.setdefault((number, sources), exchange)

    def _write(self, result: torch.Tensor, held: Sequence[Held], which: slice) -> None:
        """Copy into `result` what pieces read from some of the blocks."""
        boxes = tuple([tuple([block.box for block in one.blocks[which]]) for one in held])
        if _torch.has_symbols(boxes):
            copies = self._copies(boxes)
        else:
            copies = self._known_copies.get(boxes) or self._copies(boxes)
            self._known_copies[boxes] = copies
        for source, number, parts in copies:
            self._copy(result, parts, held[source].blocks[which][number])

    def _copies(self, boxes: Boxes) -> list[Copy]:
        """Return the copies that pieces make from blocks with these boxes."""
        copies = []
        for pieces in product(*(axis.map.within(axis.out) for axis in self.axes)):
            source = pieces[0].source
            for number, box in enumerate(boxes[source]):
                parts = [piece.copying(side) for piece, side in zip(pieces, box, strict=True)]
                if all(part.count for part in parts):
                    copies.append((source, number, parts))
        return copies

    def _copy(self, result: torch.Tensor, parts: Sequence[Piece], block: Block) -> None:
        """Copy from one block what one piece per dimension reads from it."""
        data, place = block.data, result
        for axis, part, side in zip(self.axes, parts, block.box, strict=True):
            if part.reads != side:
                data = data.narrow(axis.dim, part.reads.start - side.start, part.reads.size)
            data = _stepped(data, axis.dim, part.in_step)
            place = _outputs_of(part, place, axis)
        place.copy_(data)

    def adjoint(self, gradient: torch.Tensor) -> torch.Tensor:
        """Return the gradient of this rank's part of the only source, from the gradient of its part of the output."""
        for axis in reversed(self.axes):
            gradient = _adjoint(gradient, axis)
        return gradient


def _adjoint(gradient: torch.Tensor, axis: Axis) -> torch.Tensor:
    """Apply the adjoint along one axis: add the gradients of all copies of an index, and send them to its owner."""
    plan = axis.plans[0]
    shape = list(gradient.shape)
    blocks = []
    for side in plan.needed.parts(axis.rank):
        shape[axis.dim] = side.size
        blocks.append(Block((side,), gradient.new_zeros(shape)))
    for piece in axis.map.within(axis.out):
        block = next(block for block in blocks if block.box[0].covers(piece.reads))
        place = block.data.narrow(axis.dim, piece.reads.start - block.box[0].start, piece.reads.size)
        part = _outputs_of(piece, gradient, axis)
        if piece.in_step == 0:
            part = part.sum(axis.dim, keepdim=True)
        elif piece.in_step < 0 and piece.count > 1:
            part = part.flip(axis.dim)
        if abs(piece.in_step) > 1:
            place = place[_slice_along(axis.dim, slice(None, None, abs(piece.in_step)))]
        place += part
    own = plan.owned[axis.rank]
    if not blocks:
        shape[axis.dim] = 0
        blocks.append(Block((Interval(own.start, own.start),), gradient.new_zeros(shape)))
    held = Held((axis.dim,), tuple(blocks))
    if axis.line is None:
        return held.read((own,))
    return give_back(axis.schedule, held, (own,))


def _stepped(data: torch.Tensor, dim: int, step: int) -> torch.Tensor:
    """Take every `step`-th index of what a piece reads, reversed if `step` < 0. A single index is left to broadcast."""
    if abs(step) > 1:
        data = data[_slice_along(dim, slice(None, None, abs(step)))]
    return data.flip(dim) if step < 0 and data.shape[dim] > 1 else data


def _outputs_of(piece: Piece, tensor: torch.Tensor, axis: Axis) -> torch.Tensor:
    """Return a view of the outputs that a piece writes."""
    first = piece.out_start - axis.out.start
    if piece.out_step == 1:
        return tensor.narrow(axis.dim, first, piece.count)
    last = first + piece.out_step * (piece.count - 1) + 1
    return tensor[_slice_along(axis.dim, slice(first, last, piece.out_step))]


def _slice_along(dim: int, part: slice) -> tuple[slice, ...]:
    return (*[slice(None)] * dim, part)
