"""Ranks that draw the numbers of one device together: each some of them, and sends the others what came out.

Elements are numbered in the order of memory, in which they are drawn. What a rank owns along the outermost cut are
ranges of them, and it draws no others, unless it would have to jump from one to the next too often. Ranks that need
parts of the same ranges then share these by rows, which have all dimensions from the next cut on.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod

import torch

from ... import _torch
from ...comm import Line, line, rebox
from ...geometry import Box, Interval, shards
from ...sharding.layout import Layout
from ...sharding.plan_cache import planned

JUMP = 700_000  # numbers that could be drawn during a jump
SENT = 4  # elements that are sent while a number is drawn
MOST_RANGES = 3  # that a rank jumps between


@dataclass(frozen=True)
class Share:
    """What a rank draws of a tensor, and who gets it."""

    drawn: tuple[Interval, ...]
    total: int  # elements of the tensor
    saved: int  # numbers that no rank has to draw, less those that it could while it sends
    jumps: int
    sizes: tuple[int, ...]  # of what it draws: rows, and the dimensions in them
    owned: tuple[Box, ...]  # what is drawn, by rank of the line
    wanted: tuple[Box, ...]
    line: Line | None  # None if ranks draw just what they need

    def pays(self) -> bool:
        return self.saved > self.jumps * JUMP

    def handed_out(self, drawn: torch.Tensor) -> torch.Tensor:
        """This rank's part of the tensor, from what it has drawn, both in the order of memory."""
        if self.line is None:
            return drawn
        return rebox(drawn.view(self.sizes), self.owned, self.wanted, self.line)


@planned
def plan_share(spec: _torch.Spec) -> Share | None:
    """None where there is nothing to share. The tensor leaves no gaps in memory, and this rank is in its mesh."""
    layout = Layout.of(spec)
    order, shape = layout.memory_order, layout.shape
    cut = [at for at, dim in enumerate(order) if len(layout.shards(dim)) > 1]
    if not cut or not prod(shape):
        return None
    outer = prod(shape[dim] for dim in order[: cut[0]])
    if outer > MOST_RANGES:
        return _share(layout, order[cut[0] :], [Interval(0, outer)], outer)
    dim, inside = order[cut[0]], order[cut[1] :] if len(cut) > 1 else ()
    rows = prod(shape[at] for at in order[cut[0] + 1 :] if at not in inside)  # of one index of this dimension
    own, largest = layout.own(dim), max(map(len, layout.shards(dim)))
    starts = [at * shape[dim] for at in range(outer)]
    ranges = [Interval((start + own.start) * rows, (start + own.stop) * rows) for start in starts]
    return _share(layout, inside, ranges, outer * largest * rows)


def _share(layout: Layout, inside: Sequence[int], ranges: Sequence[Interval], most: int) -> Share:
    """Of rows in these ranges, which have the dimensions `inside`. Any rank needs parts of `most` rows at most."""
    mesh, sizes = layout.mesh, tuple(layout.shape[dim] for dim in inside)
    cutting = {mesh_dim for dim in inside for mesh_dim in layout.cuts.get(dim, ()) if mesh.size(mesh_dim) > 1}
    mesh_dims, row, rows = tuple(sorted(cutting)), prod(sizes), sum(map(len, ranges))
    along = line(mesh, mesh_dims) if mesh_dims else None
    places = [dict(zip(mesh_dims, at, strict=True)) for at in product(*(range(mesh.size(m)) for m in mesh_dims))]
    shares = shards(rows, (len(places),))
    mine = shares[along.rank if along else 0]
    largest = -(-most // len(places)) * row
    return Share(
        drawn=tuple(Interval(part.start * row, part.stop * row) for part in _parts(mine, ranges)),
        total=prod(layout.shape),
        saved=prod(layout.shape) - largest - (largest // SENT if along else 0),
        jumps=len(ranges) + 1,
        sizes=(len(mine), *sizes),
        owned=tuple((share, *(Interval(0, size) for size in sizes)) for share in shares),
        wanted=tuple((Interval(0, rows), *(layout.part_at(dim, at) for dim in inside)) for at in places),
        line=along,
    )


def _parts(wanted: Interval, ranges: Sequence[Interval]) -> Iterator[Interval]:
    """Which parts of the ranges are `wanted`, which counts as if they followed each other."""
    before = 0
    for each in ranges:
        part = wanted.shift(each.start - before) & each
        if part:
            yield part
        before += len(each)
