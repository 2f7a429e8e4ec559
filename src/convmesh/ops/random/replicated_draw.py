"""Drawing the numbers of one device, however the tensor is sharded.

Which of its numbers a generator takes for an element is not known in general: on a CPU that differs between operators,
and on a GPU the order of elements depends on the size of the tensor. So every rank draws all of the tensor from its
generator, which has the same state on all ranks, and keeps its own part. This costs the time of one device. It also
costs memory for the full tensor, for a moment, so a tensor of more than `LARGEST_DRAWN` elements is drawn in tiles
instead, each from a generator of its own: then the numbers are not those of one device, but still do not depend on the
sharding, and a rank draws only tiles that it needs.

It is known of the zeros and ones that a CPU draws for dropout (`bernoulli.py`): ranks share these, at any size.
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
TILES = 8  # along each dimension that has at least `SMALLEST_TILED` indices
SMALLEST_TILED = 64

STAYS = "all; the numbers are those of one device, if all ranks have the same seed"
TILES_BEYOND = (
    "every rank draws all numbers and keeps its own; over 2^26 elements it draws tiles, and the numbers are no longer "
    "those of one device, yet the same for every sharding"
)
DRAWN = Behaviour(STAYS, f"nothing: {TILES_BEYOND}")
SHARED = Behaviour(STAYS,
    "where millions of elements have one probability on a CPU: every rank draws a share of the numbers and sends which "
    "elements are ones, a byte each, unless its own are a few ranges of memory; the numbers are those of one device at "
    f"any size. Otherwise nothing: {TILES_BEYOND}",
)  # fmt: skip

Draw = Callable[[torch.Tensor, torch.Generator | None], Any]


def where_drawn(layout: Layout, dtype: torch.dtype | None = None, stride: Stride | None = None) -> Layout:
    """Where numbers for a tensor are drawn: a Partial(sum) is no place for them. In the order of the strides, which are
    those of one device."""
    drawn = layout.without_partial().typed(dtype or layout.dtype)
    return drawn if stride is None else replace(drawn, stride=stride)


def draw_own(layout: Layout, device: torch.device, generator: torch.Generator | None, draw: Draw) -> torch.Tensor:
    """This rank's local tensor of what `draw` fills an empty tensor with."""
    note(layout, device, generator)
    own = tuple(layout.own(dim) for dim in range(len(layout.shape)))
    if prod(layout.shape) > LARGEST_DRAWN and not _torch.tracing():
        return _drawn_in_tiles(layout, own, device, generator, draw)
    full = torch.empty_strided(layout.shape, layout.stride, dtype=layout.dtype, device=device)
    drawn: torch.Tensor = draw(full, generator)
    return narrowed(drawn, own).clone() if layout.sharded_dims else drawn  # a copy, so that the full tensor goes


def _drawn_in_tiles(
    layout: Layout, own: Box, device: torch.device, generator: torch.Generator | None, draw: Draw
) -> torch.Tensor:
    # One number of the generator, which all ranks draw alike, is the seed of all tiles.
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
    return product(*(shards(size, (TILES,)) if size >= SMALLEST_TILED else (Interval(0, size),) for size in shape))


def _inside(box: Box, frame: Box) -> Box:
    return tuple(side.shift(-outer.start) for side, outer in zip(box, frame, strict=True))


def narrowed(tensor: torch.Tensor, box: Box) -> torch.Tensor:
    for dim, side in enumerate(box):
        if len(side) != tensor.shape[dim]:
            tensor = tensor.narrow(dim, side.start, len(side))
    return tensor
