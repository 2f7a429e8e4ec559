"""Drawing the numbers of one device, however the tensor is sharded.

Which number of a generator belongs to which element is not known in general: on a CPU it differs between operators, and
on a GPU it depends on the size of the tensor. So every rank draws the full tensor from its generator, which has the
same state on all ranks, and keeps its shard. This costs the time of one device, and temporarily storage for the full
tensor. So a tensor of more than `LARGEST_DRAWN` elements is drawn in tiles instead, each from its own generator: these
are not the numbers of one device, but still do not depend on the sharding, and a rank draws only the tiles that it
needs.

The zeros and ones that a CPU draws for dropout are an exception (`bernoulli.py`): ranks share these, at any size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import product
from math import prod
from typing import Any

import torch

from ... import _torch
from ...geometry import Box, Interval, shards
from ...sharding.layout import Layout
from ...sharding.registry import Behaviour
from ...strides import Stride
from .noted_draws import note

LARGEST_DRAWN = 1 << 26
TILES = 8  # along each dimension of at least `SMALLEST_TILED` indices
SMALLEST_TILED = 64

STAYS = "all dimensions; the numbers are those of one device if all ranks have the same seed"
TILES_BEYOND = (
    "every rank draws all numbers and keeps its shard. More than 2^26 elements are drawn in tiles, whose numbers are "
    "the same for every sharding, but not those of one device"
)
DRAWN = Behaviour(STAYS, f"nothing: {TILES_BEYOND}")
SHARED = Behaviour(STAYS,
    "on CPUs, for millions of elements with one probability: every rank draws a part of the numbers and sends zeros "
    "and ones, a byte each, to the ranks that own them, unless shards are a few ranges of memory; at any size these "
    f"are the numbers of one device. Otherwise nothing: {TILES_BEYOND}",
)  # fmt: skip

Draw = Callable[[torch.Tensor, torch.Generator | None], Any]
"""Takes an empty tensor and a generator (None: the default one) and returns the tensor filled."""


def drawing_layout(layout: Layout, dtype: torch.dtype | None = None, stride: Stride | None = None) -> Layout:
    """The layout in which numbers for a tensor are drawn: not Partial, with the strides of one device's result."""
    drawn = layout.without_partial().typed(dtype or layout.dtype)
    return drawn if stride is None else replace(drawn, stride=stride)


def draw_shard(layout: Layout, device: torch.device, generator: torch.Generator | None, draw: Draw) -> torch.Tensor:
    """Return this rank's shard of what `draw` fills an empty full tensor with."""
    note(layout, device, generator)
    own = tuple(layout.own(dim) for dim in range(len(layout.shape)))
    if prod(layout.shape) > LARGEST_DRAWN and not _torch.tracing():
        return _drawn_in_tiles(layout, own, device, generator, draw)
    full = torch.empty_strided(layout.shape, layout.stride, dtype=layout.dtype, device=device)
    drawn: torch.Tensor = draw(full, generator)
    return narrowed(drawn, own).clone() if layout.sharded_dims else drawn  # a copy, so that the full tensor is freed


def _drawn_in_tiles(
    layout: Layout, own: Box, device: torch.device, generator: torch.Generator | None, draw: Draw
) -> torch.Tensor:
    """Draw the tiles that this rank's shard needs."""
    # One number of the generator, the same on all ranks, seeds all tiles.
    seed = int(torch.empty((), dtype=torch.int64, device=device).random_(generator=generator))
    result = torch.empty(layout.local_shape, dtype=layout.dtype, device=device)
    for number, tile in enumerate(_tiles(layout.shape)):
        common = tuple(a & b for a, b in zip(tile, own, strict=True))
        if not all(common):
            continue
        source = torch.Generator(device).manual_seed((seed + number * 0x9E3779B97F4A7C15) % 2**63)
        empty = torch.empty([len(side) for side in tile], dtype=layout.dtype, device=device)
        part = narrowed(draw(empty, source), _inside(common, tile))
        narrowed(result, _inside(common, own)).copy_(part)
    return result


def _tiles(shape: tuple[int, ...]) -> Iterator[Box]:
    """Return the boxes in which a large tensor is drawn: they depend on its shape only."""
    return product(*(shards(size, (TILES,)) if size >= SMALLEST_TILED else (Interval(0, size),) for size in shape))


def _inside(box: Box, frame: Box) -> Box:
    """Return `box` relative to the start of `frame`."""
    return tuple(side.shift(-outer.start) for side, outer in zip(box, frame, strict=True))


def narrowed(tensor: torch.Tensor, box: Box) -> torch.Tensor:
    """Return a view of a box of the tensor."""
    for dim, side in enumerate(box):
        if len(side) != tensor.shape[dim]:
            tensor = tensor.narrow(dim, side.start, len(side))
    return tensor
