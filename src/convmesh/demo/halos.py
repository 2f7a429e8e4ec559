"""Close-ups of what each layer of the demo's network reads of other shards."""

from __future__ import annotations

import torch
from markupsafe import Markup

from ..report.charts import legend
from ..report.shards import color, loupe, window
from .picture import embedded
from .settings import Shape
from .traffic import Layer

CLOSE_UP = 28  # the side of a close-up, in pixels of the picture


def close_ups(picture: torch.Tensor, mesh: Shape, layers: list[Layer]) -> list[tuple[Layer, Markup]]:
    """Return a close-up of where shards meet for each layer with halos, showing the first and the last rank."""
    sizes = picture.shape[:2]
    (top, left), side = window(sizes, mesh, CLOSE_UP)
    address = embedded(picture[top : top + side, left : left + side].contiguous(), lossless=True)
    drawings = []
    for layer in layers:
        if layer.sides is not None and layer.sides.least_bytes(1):
            sides = layer.sides
            boxes = [(rank, sides.owns(place), sides.reads(place)) for rank, place in _pairs(mesh)]
            drawing = loupe(boxes, (top, left), side, sizes[0] / sides.input[2], address)
            drawings.append((layer, drawing))
    return drawings


def keys(mesh: Shape) -> Markup:
    """Return the legend of the close-ups."""
    ranks = [rank for rank, _ in _pairs(mesh)]
    owned = [(f"rank {rank} owns", color(rank), "box") for rank in ranks]
    return legend(owned + [(f"rank {rank} reads", color(rank), "box dashed") for rank in ranks])


def _pairs(mesh: Shape) -> list[tuple[int, Shape]]:
    """(rank, coordinates) of the mesh's first and last rank."""
    return [(0, (0, 0)), (mesh[0] * mesh[1] - 1, (mesh[0] - 1, mesh[1] - 1))]
