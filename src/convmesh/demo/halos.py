"""The picture with the shards drawn over it, and a look through the loupe at what each layer reads of other shards."""

from __future__ import annotations

from html import escape
from itertools import product

import torch

from ..geometry import Box, shards
from .charts import legend
from .picture import embedded
from .settings import Shape
from .traffic import Layer

RANKS = ("#4f9dff", "#ff9d4f", "#5fd38d", "#f06fb0", "#c59bff", "#ffd84f", "#4fe0e0", "#ff7a7a")
LOUPE = 28  # the side of a loupe's square, in pixels of the picture


def color(rank: int) -> str:
    return RANKS[rank % len(RANKS)]


def shard_map(picture: torch.Tensor, mesh: Shape) -> str:
    """A (height, width, 3) picture, and over it who owns what."""
    height, width = picture.shape[:2]
    boxes, tags = [], []
    for rank, (down, across) in enumerate(product(range(mesh[0]), range(mesh[1]))):
        rows, columns = shards(height, (mesh[0],))[down], shards(width, (mesh[1],))[across]
        boxes.append(
            f'<rect x="{columns.start}" y="{rows.start}" width="{len(columns)}" height="{len(rows)}" '
            f'fill="{color(rank)}" fill-opacity=".13" stroke="{color(rank)}" stroke-width="2"/>'
        )
        words = f"rank {rank} · {len(rows)} &times; {len(columns)}"
        tags.append(
            f'<span class="tag" style="top: {rows.start / height:.2%}; left: {columns.start / width:.2%}; '
            f'color: {color(rank)}">{words}</span>'
        )
    return (
        f'<div class="over"><img src="{embedded(picture)}" alt="The picture in {mesh[0]} x {mesh[1]} shards">'
        f'<svg viewBox="0 0 {width} {height}" preserveAspectRatio="none">{"".join(boxes)}</svg>{"".join(tags)}</div>'
    )


def loupes(picture: torch.Tensor, mesh: Shape, layers: list[Layer]) -> str:
    """Where the shards meet, for each layer what the first and the last rank read beyond what they own."""
    height, width = picture.shape[:2]
    border = [shards(size, (parts,))[0].stop for size, parts in zip((height, width), mesh, strict=True)]
    middle = [stop if stop < size else size // 2 for stop, size in zip(border, (height, width), strict=True)]
    side = min(LOUPE, height, width)
    top, left = (max(0, min(at - side // 2, size - side)) for at, size in zip(middle, (height, width), strict=True))
    address = embedded(picture[top : top + side, left : left + side].contiguous(), lossless=True)
    pairs = [(0, (0, 0)), (mesh[0] * mesh[1] - 1, (mesh[0] - 1, mesh[1] - 1))]
    figures = []
    for layer in layers:
        if layer.sides is None or not layer.sides.least_bytes(1):
            continue
        scale = height / layer.sides.input[2]
        drawn = "".join(
            _box(layer.sides.owns(place), scale, color(rank), False)
            + _box(layer.sides.reads(place), scale, color(rank), True)
            for rank, place in pairs
        )
        figures.append(
            f'<figure><div class="over pixels"><img src="{address}" alt=""><svg viewBox="{left} {top} {side} {side}">'
            f"{drawn}</svg></div><figcaption><b>{escape(layer.name)}</b><br>{_words(layer)}"
            "</figcaption></figure>"
        )
    owned = [(f"rank {rank} owns", color(rank), "box") for rank, _ in pairs]
    keys = legend(owned + [(f"rank {rank} reads", color(rank), "box dashed") for rank, _ in pairs])
    return f'{keys}<div class="loupes">{"".join(figures)}</div>'


def _box(box: Box, scale: float, stroke: str, reads: bool) -> str:
    rows, columns = box
    look = f'fill="{stroke}" fill-opacity=".38" stroke-dasharray="4 3"' if reads else 'fill="none"'
    return (
        f'<rect x="{columns.start * scale:g}" y="{rows.start * scale:g}" width="{len(columns) * scale:g}" '
        f'height="{len(rows) * scale:g}" stroke="{stroke}" stroke-width="2" {look}/>'
    )


def _words(layer: Layer) -> str:
    assert layer.sides is not None
    shape = layer.sides.input
    return f"{escape(layer.kind)}<br>of {shape[1]} channels, {shape[2]} &times; {shape[3]}"
