"""Ranks draw the numbers of one device together: each draws a share and sends the others what they need of it.

Elements are numbered in storage order, in which they are drawn. What a rank owns along the outermost sharded dimension
is some ranges of them; it draws no others, unless it would have to jump between ranges too often. Ranks that need parts
of the same ranges share these by rows, which contain all dimensions from the next sharded dimension on.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod

import torch

from ... import _torch
from ...comm import Schedule, boxes, fetch, rank_line
from ...geometry import Box, Grid, Interval, Shards
from ...sharding.layout import Layout
from ...sharding.plan_cache import planned

JUMP = 700_000  # numbers that could be drawn in the time of one jump of the generator
SENT = 4  # elements that can be sent in the time of drawing one number
MOST_RANGES = 3  # between which a rank jumps at most


@dataclass(frozen=True)
class Share:
    """What this rank draws of a tensor, and which ranks get it."""

    drawn: tuple[Interval, ...]
    total: int  # elements of the tensor
    saved: int  # numbers that a rank need not draw, less those that it could draw in the time of sending
    jumps: int
    owned: Box  # what this rank draws: a range of rows, and of each dimension within them
    needed: Box  # what it needs, in the same dimensions
    schedule: Schedule | None  # None if every rank draws just what it needs

    def pays(self) -> bool:
        """Whether sharing saves more time than the jumps cost."""
        return self.saved > self.jumps * JUMP

    def exchange(self, drawn: torch.Tensor) -> torch.Tensor:
        """Exchange the drawn numbers: return this rank's shard of the tensor. Both are in storage order."""
        if self.schedule is None:
            return drawn
        sizes = tuple(map(len, self.owned))
        return fetch(self.schedule, drawn.view(sizes), tuple(range(len(sizes))), self.owned, self.needed)


@planned
def plan_share(spec: _torch.Spec) -> Share | None:
    """Plan how ranks share the drawing; None if nothing is sharded.

    The tensor must have no gaps in its storage, and this rank must be in its mesh.
    """
    layout = Layout.of(spec)
    order, shape = layout.memory_order, layout.shape
    sharded = [at for at, dim in enumerate(order) if len(layout.shards(dim)) > 1]
    if not sharded or not prod(shape):
        return None
    outer = prod(shape[dim] for dim in order[: sharded[0]])
    if outer > MOST_RANGES:
        return _share(layout, order[sharded[0] :], [Interval(0, outer)], outer)
    dim, inside = order[sharded[0]], order[sharded[1] :] if len(sharded) > 1 else ()
    rows = prod(shape[at] for at in order[sharded[0] + 1 :] if at not in inside)  # per index of this dimension
    own, largest = layout.own(dim), len(layout.shards(dim)[0])
    starts = [at * shape[dim] for at in range(outer)]
    ranges = [Interval((start + own.start) * rows, (start + own.stop) * rows) for start in starts]
    return _share(layout, inside, ranges, outer * largest * rows)


def _share(layout: Layout, inside: Sequence[int], ranges: Sequence[Interval], most: int) -> Share:
    """Plan sharing the rows in these ranges, each with the dimensions `inside`; a rank needs parts of at most
    `most`."""
    mesh, sizes = layout.mesh, tuple(layout.shape[dim] for dim in inside)
    over = [tuple(m for m in layout.sharded_dims.get(dim, ()) if mesh.size(m) > 1) for dim in inside]
    mesh_dims, row, rows = tuple(sorted({m for dims in over for m in dims})), prod(sizes), sum(map(len, ranges))
    line = rank_line(mesh, mesh_dims)
    full = [Interval(0, size) for size in (rows, *sizes)]
    along = [tuple(map(mesh_dims.index, dims)) for dims in over]
    inner = [Shards(size, tuple(map(mesh.size, dims))) for size, dims in zip(sizes, over, strict=True)]
    drawn = Grid(line.sizes, (Shards(rows, line.sizes), *full[1:]), (tuple(range(len(mesh_dims))), *[()] * len(sizes)))
    needed = Grid(line.sizes, (full[0], *inner), ((), *along))
    (own,), (need,) = drawn.boxes(line.rank), needed.boxes(line.rank)
    largest = -(-most // line.size) * row
    return Share(
        drawn=tuple(Interval(part.start * row, part.stop * row) for part in _parts(own[0], ranges)),
        total=prod(layout.shape),
        saved=prod(layout.shape) - largest - (largest // SENT if mesh_dims else 0),
        jumps=len(ranges) + 1,
        owned=own,
        needed=need,
        schedule=boxes(line, drawn, needed) if mesh_dims else None,
    )


def _parts(wanted: Interval, ranges: Sequence[Interval]) -> Iterator[Interval]:
    """Yield the parts of the ranges that `wanted` covers, which counts indices as if the ranges followed each other."""
    before = 0
    for each in ranges:
        part = wanted.shift(each.start - before) & each
        if part:
            yield part
        before += len(each)
