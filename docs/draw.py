"""Draws the pictures of the site from the library's own intervals: `python docs/draw.py`."""

from __future__ import annotations

from pathlib import Path

from convmesh.geometry import Interval, Window, shards

FOLDER = Path(__file__).parent / "images"
COLOURS = ("#5b9bd5", "#e39a4f", "#5fb38a", "#a98bd3")  # a rank each; readable on white and on black
STYLE = """
  text { font: 14px system-ui, sans-serif; fill: #24292f }
  .small { font-size: 12px }
  .inside { fill: #0d1117 }
  .middle { text-anchor: middle }
  .end { text-anchor: end }
  .line { stroke: #6e7781; fill: none; stroke-width: 1.5 }
  .faint { stroke: #8c959f; fill: none }
  @media (prefers-color-scheme: dark) { text { fill: #e6edf3 } .inside { fill: #0d1117 } .line { stroke: #9ea7b3 } }
"""


class Picture:
    """Elements of an SVG, added one after the other."""

    def __init__(self, width: int, height: int, title: str):
        self.parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" aria-label="{title}">',
            f"<style>{STYLE}</style>",
            '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
            '<path d="M0 0 8 4 0 8z" fill="#8c959f"/></marker></defs>',
        ]

    def box(
        self, x: float, y: float, w: float, h: float, colour: str, opacity: float = 1.0, dashed: bool = False
    ) -> None:
        edge = f'stroke="{colour}" stroke-width="2" stroke-dasharray="4 3"' if dashed else ""
        self.parts.append(
            f'<rect x="{x:g}" y="{y:g}" width="{w:g}" height="{h:g}" rx="3" fill="{colour}" '
            f'fill-opacity="{opacity:g}" {edge}/>'
        )

    def text(self, x: float, y: float, text: str, kind: str = "") -> None:
        self.parts.append(f'<text x="{x:g}" y="{y:g}" class="{kind}">{text}</text>')

    def line(self, *points: tuple[float, float], arrow: bool = False, kind: str = "line") -> None:
        path = " ".join(f"{x:g},{y:g}" for x, y in points)
        tip = 'marker-end="url(#tip)"' if arrow else ""
        self.parts.append(f'<polyline points="{path}" class="{kind}" {tip}/>')

    def save(self, name: str) -> None:
        (FOLDER / name).write_text("\n".join([*self.parts, "</svg>"]) + "\n")


def intervals() -> None:
    """One dimension of a strided convolution with an even kernel on three ranks: owned, read, received."""
    size, ranks, window = 21, 3, Window(kernel=4, stride=2, padding=1)
    owned, produced = shards(size, (ranks,)), shards(window.coarse_size(size), (ranks,))
    cell, left = 30, 150
    picture = Picture(left + size * cell + 20, 330, "Which inputs each rank owns, reads and receives")

    def row(y: float, parts: tuple[Interval, ...], step: float, label: str) -> None:
        picture.text(left - 12, y + 19, label, "end")
        for rank, part in enumerate(parts):
            for index in range(part.start, part.stop):
                x = left + index * step * cell
                picture.box(x + 1, y, step * cell - 2, 28, COLOURS[rank])
                picture.text(x + step * cell / 2, y + 19, str(index), "inside middle small")

    row(10, owned, 1, "input, owned by")
    for rank in range(ranks):
        y = 74 + rank * 46
        reads = window.reads(produced[rank])
        inside = reads & Interval(0, size)
        picture.text(left - 12, y + 19, f"rank {rank} reads", "end")
        for owner, part in enumerate(owned):
            shared = inside & part
            if shared:
                x, w = left + shared.start * cell + 1, len(shared) * cell - 2
                picture.box(x, y, w, 28, COLOURS[owner], 1 if owner == rank else 0.45, dashed=owner != rank)
                if owner != rank:
                    picture.text(x + w / 2, y + 19, f"from {owner}", "middle small")
    row(236, produced, 2, "output, owned by")
    x = left
    for rank in range(ranks):
        picture.box(x, 292, 18, 18, COLOURS[rank])
        picture.text(x + 26, 306, f"rank {rank}")
        x += 100
    picture.box(x, 292, 18, 18, COLOURS[0], 0.45, dashed=True)
    picture.text(x + 26, 306, "halo: read, but owned by another rank")
    picture.save("intervals.svg")


def halo() -> None:
    """A rank's tile of an image on 2 x 2 ranks; two exchanges bring the halo with its corner."""
    picture = Picture(
        760, 300, "Two exchanges, along the height and then along the width, bring the halo and its corner"
    )
    tile, rim = 110, 22
    for step, title in enumerate(("each rank owns a tile", "1. exchange along h", "2. exchange along w")):
        left, top = 20 + step * 250, 40
        picture.text(left, 22, title)
        for rank in range(4):
            x, y = left + rank % 2 * tile, top + rank // 2 * tile
            picture.box(x + 1, y + 1, tile - 2, tile - 2, COLOURS[rank], 1 if step == 0 or rank == 0 else 0.25)
            picture.text(
                x + tile / 2, y + tile / 2 + 5, f"rank {rank}", "inside middle" if step == 0 or rank == 0 else "middle"
            )
        if step >= 1:
            picture.box(left + 1, top + tile + 1, tile - 2, rim, COLOURS[2], 0.9, dashed=True)
            picture.line((left + tile / 5, top + tile + 66), (left + tile / 5, top + tile + rim + 6), arrow=True)
        if step == 2:
            picture.box(left + tile + 1, top + 1, rim, tile - 2, COLOURS[1], 0.9, dashed=True)
            picture.box(left + tile + 1, top + tile + 1, rim, rim, COLOURS[3], 0.9, dashed=True)
            picture.line((left + tile + 72, top + tile / 5), (left + tile + rim + 6, top + tile / 5), arrow=True)
            picture.line(
                (left + tile + 72, top + tile + rim / 2), (left + tile + rim + 6, top + tile + rim / 2), arrow=True
            )
    picture.text(
        20,
        288,
        "What rank 0 holds after each exchange. The corner of rank 3 comes by way of rank 1, in the second exchange.",
        "small",
    )
    picture.save("halo.svg")


def overlap() -> None:
    """Communication behind computation: the exchange runs while a rank convolves its own tile."""
    picture = Picture(760, 150, "The exchange runs while a rank convolves the tile that it owns")
    for row, (label, bars) in enumerate(
        (
            ("network", ((110, 250, 1, "halo exchange"),)),
            ("compute", ((110, 400, 0, "convolve the owned tile"), (510, 150, 2, "add the halo's part"))),
        )
    ):
        y = 20 + row * 46
        picture.text(98, y + 21, label, "end")
        for x, width, colour, text in bars:
            picture.box(x, y, width - 4, 32, COLOURS[colour])
            picture.text(x + width / 2, y + 21, text, "inside middle")
    picture.line((110, 118), (720, 118), arrow=True)
    picture.text(720, 138, "time", "end small")
    picture.line((358, 36), (585, 36), (585, 62), arrow=True, kind="faint")
    picture.save("overlap.svg")


def meshes() -> None:
    """Three ways to put a batch of two images on four ranks."""
    picture = Picture(760, 250, "Three meshes of four ranks for a batch of two images")
    side, gap = 100, 14
    # How many parts there are along height and width, and the rank of the first part of each image.
    layouts = (("data=0, h=2 (2 x 2)", 2, 1, (0, 2)), ("h=2 (4)", 4, 1, (0, 0)), ("h=2, w=3 (2 x 2)", 2, 2, (0, 0)))
    for number, (title, rows, columns, first) in enumerate(layouts):
        left = 20 + number * 250
        picture.text(left, 22, title)
        for image in range(2):
            for part in range(rows * columns):
                w, h = side / columns, side / rows
                x, y = left + image * (side + gap) + part % columns * w, 40 + part // columns * h
                picture.box(x + 1, y + 1, w - 2, h - 2, COLOURS[first[image] + part])
            picture.text(left + image * (side + gap) + side / 2, 40 + side + 20, f"image {image}", "middle small")
    notes = (
        ("one border in each image", "the fewest bytes"),
        ("three borders in each image", "the most bytes"),
        ("two borders in each image", "two exchanges a layer"),
    )
    for number, lines in enumerate(notes):
        for line, text in enumerate(lines):
            picture.text(20 + number * 250, 186 + 18 * line, text, "small")
    for rank in range(4):
        picture.box(20 + 90 * rank, 222, 16, 16, COLOURS[rank])
        picture.text(42 + 90 * rank, 235, f"rank {rank}", "small")
    picture.save("meshes.svg")


if __name__ == "__main__":
    for draw in (intervals, halo, overlap, meshes):
        draw()
