"""Drawings of a sharded tensor: a plane, a volume, and a close-up of what a rank reads of others."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from itertools import product

from markupsafe import Markup

from ..geometry import Box, shards

RANKS = ("#4f9dff", "#ff9d4f", "#5fd38d", "#f06fb0", "#c59bff", "#ffd84f", "#4fe0e0", "#ff7a7a")
_SLANT = 0.5, 0.42  # how far one index of depth is drawn to the right and up, in indices of width and height
MOST_TAGS, MOST_ACROSS = 16, 4  # up to this many ranks, in all and side by side, shards show their rank
FLATTEST = 6  # the largest aspect ratio that is drawn to scale: a flatter plane would be invisible


def color(rank: int) -> str:
    """The color of a rank."""
    return RANKS[rank % len(RANKS)]


def plane(sizes: Sequence[int], parts: Sequence[int], picture: str | None = None, halo: Box | None = None) -> Markup:
    """Draw the shards of a plane (height, width), over a picture if given; `halo` is the box that a rank reads."""
    height, width = sizes
    boxes, tags = [], []
    for rank, (down, across) in enumerate(product(range(parts[0]), range(parts[1]))):
        rows, columns = shards(height, (parts[0],))[down], shards(width, (parts[1],))[across]
        boxes.append(rectangle((rows, columns), color(rank), 0.13 if picture else 0.3))
        if parts[0] * parts[1] <= MOST_TAGS and parts[1] <= MOST_ACROSS:
            sizes_of_it = f" · {len(rows)} &times; {len(columns)}" if parts[1] <= 2 else ""
            tags.append(
                f'<span class="tag" style="top: {rows.start / height:.2%}; left: {columns.start / width:.2%}; '
                f'color: {color(rank)}">rank {rank}{sizes_of_it}</span>'
            )
    shape = min(max(width / height, 1 / FLATTEST), FLATTEST)
    back = f'<img src="{picture}" alt="">' if picture else f'<div style="aspect-ratio: {shape:.3f}"></div>'
    read = "" if halo is None else f'<g class="reads">{rectangle(halo, "currentColor", 0.12, dashed=True)}</g>'
    return Markup(
        f'<div class="over" role="img" aria-label="{parts[0]} x {parts[1]} shards">{back}<svg viewBox="0 0 {width} '
        f'{height}" preserveAspectRatio="none">{"".join(boxes)}{read}</svg>{"".join(tags)}</div>'
    )


def volume(sizes: Sequence[int], parts: Sequence[int], halo: Box | None = None) -> Markup:
    """Draw the shards of a volume (depth, height, width) from the front, right and top; `halo` is what a rank reads."""
    depth, height, width = sizes
    right, up = _SLANT
    view = width + depth * right, height + depth * up
    drawn = []
    for rank, place in enumerate(product(*map(range, parts))):
        box = tuple(shards(size, (count,))[at] for size, count, at in zip(sizes, parts, place, strict=True))
        faces = _visible(box, place, parts)
        drawn += [
            f'<polygon points="{_points(face, sizes)}" style="fill: {color(rank)}; --dim: {shade}">'
            f"<title>rank {rank}: {' x '.join(str(len(side)) for side in box)}</title></polygon>"
            for face, shade in faces
        ]
    reads = "" if halo is None else "".join(
        f'<polyline points="{_points(edge, sizes)}"/>' for edge in _edges(halo)
    )  # fmt: skip
    margin = 0.01 * view[0]
    box_of_view = f"{-margin:g} {-margin:g} {view[0] + 2 * margin:g} {view[1] + 2 * margin:g}"
    return Markup(
        f'<svg class="volume" role="img" aria-label="{" x ".join(map(str, parts))} shards" viewBox="{box_of_view}">'
        f'{"".join(drawn)}<g class="reads">{reads}</g></svg>'
    )


Corner = tuple[float, float, float]  # depth, height, width


def _points(corners: Sequence[Corner], sizes: Sequence[int]) -> str:
    """Project corners onto the page, as SVG points."""
    right, up = _SLANT
    return " ".join(f"{w + d * right:.2f},{h + (sizes[0] - d) * up:.2f}" for d, h, w in corners)


def _visible(box: Box, place: Sequence[int], parts: Sequence[int]) -> list[tuple[list[Corner], str]]:
    """Return the faces of a shard on the front, top and right of the volume, each with its shade."""
    (d0, d1), (h0, h1), (w0, w1) = ((side.start, side.stop) for side in box)
    faces: list[tuple[list[Corner], str]] = []
    if place[0] == 0:
        faces.append(([(d0, h0, w0), (d0, h0, w1), (d0, h1, w1), (d0, h1, w0)], "0%"))
    if place[1] == 0:
        faces.append(([(d0, h0, w0), (d0, h0, w1), (d1, h0, w1), (d1, h0, w0)], "-18%"))
    if place[2] == parts[2] - 1:
        faces.append(([(d0, h0, w1), (d1, h0, w1), (d1, h1, w1), (d0, h1, w1)], "22%"))
    return faces


def _edges(box: Box) -> list[list[Corner]]:
    """Return the edges of a box as lines: its front, its back, and what connects them."""
    (d0, d1), (h0, h1), (w0, w1) = ((side.start, side.stop) for side in box)
    around: list[tuple[float, float]] = [(h0, w0), (h0, w1), (h1, w1), (h1, w0), (h0, w0)]
    return [
        [(d0, h, w) for h, w in around],
        [(d1, h, w) for h, w in around],
        *([(float(d0), h, w), (float(d1), h, w)] for h, w in around[:4]),
    ]


def loupe(
    ranks: Sequence[tuple[int, Box, Box]], corner: tuple[int, int], side: int, scale: float, picture: str | None = None
) -> Markup:
    """Draw a close-up of a square of `side` pixels at `corner`.

    `ranks` are (rank, box that it owns, box that it reads) in a layer whose own pixels are `scale` pixels wide.
    """
    top, left = corner
    drawn = "".join(
        rectangle(owned, color(rank), 0, scale) + rectangle(read, color(rank), 0.38, scale, dashed=True)
        for rank, owned, read in ranks
    )
    lines = "" if picture else "".join(
        f'<line class="grid" x1="{left}" x2="{left + side}" y1="{top + at:g}" y2="{top + at:g}"/>'
        f'<line class="grid" x1="{left + at:g}" x2="{left + at:g}" y1="{top}" y2="{top + side}"/>'
        for at in _steps(side, scale)
    )  # fmt: skip
    back = f'<img src="{picture}" alt="">' if picture else '<div class="paper"></div>'
    return Markup(
        f'<div class="over pixels">{back}<svg viewBox="{left} {top} {side} {side}">{lines}{drawn}</svg></div>'
    )


def _steps(side: int, scale: float) -> list[float]:
    return [at * scale for at in range(int(side / scale) + 1)]


def rectangle(box: Box, stroke: str, opacity: float, scale: float = 1.0, dashed: bool = False) -> str:
    """Return an SVG rectangle."""
    rows, columns = box
    look = f'fill="{stroke}" fill-opacity="{opacity:g}"' if opacity else 'fill="none"'
    dashes = ' stroke-dasharray="4 3"' if dashed else ""
    return (
        f'<rect x="{columns.start * scale:g}" y="{rows.start * scale:g}" width="{len(columns) * scale:g}" '
        f'height="{len(rows) * scale:g}" stroke="{escape(stroke)}" stroke-width="2" {look}{dashes}/>'
    )


def window(sizes: Sequence[int], parts: Sequence[int], side: int) -> tuple[tuple[int, int], int]:
    """Return the corner and the side of a square where the shards of a plane meet."""
    stops = [shards(size, (count,))[0].stop for size, count in zip(sizes, parts, strict=True)]
    middle = [stop if stop < size else size // 2 for stop, size in zip(stops, sizes, strict=True)]
    side = min(side, *sizes)
    top, left = (max(0, min(at - side // 2, size - side)) for at, size in zip(middle, sizes, strict=True))
    return (top, left), side
