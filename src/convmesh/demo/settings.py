"""What is trained, and on what: the same for one process and for every mesh."""

from __future__ import annotations

import re
from dataclasses import dataclass

Shape = tuple[int, int]  # how many ranks along the height and along the width

AXES = {"h": 2, "w": 3}  # the names of the mesh's dimensions, and the picture's dimensions that are sharded over them
PICTURES = {
    "hubble_deep_field": "The Hubble Deep Field (NASA, 1995)",
    "retina": "The retina of a human eye (M. Häggström, 2014)",
    "astronaut": "Eileen Collins, astronaut (NASA)",
}


class DemoError(RuntimeError):
    """The demo cannot go on; the message tells the user why."""


@dataclass(frozen=True)
class Settings:
    """The options of a training run."""

    picture: str = "hubble_deep_field"
    crop: int | None = None  # the side of a square in the middle of the picture; by default the full picture
    steps: int = 12
    noise: float = 0.1  # its standard deviation, where white is 1
    channels: tuple[int, ...] = (12, 20, 28)
    strides: tuple[int, ...] = (2, 2)
    rate: float = 0.02
    seed: int = 0
    double: bool = False  # in float64, where rounding is too small to be seen


def mesh_shape(text: str) -> Shape:
    """Parse `2x2`: 2 ranks along the height times 2 along the width."""
    match = re.fullmatch(r"([1-9]\d*)x([1-9]\d*)", text)
    if match is None:
        raise ValueError(f"{text!r} is no mesh: write ranks along the height x ranks along the width, such as 2x2")
    return int(match[1]), int(match[2])


def mesh_name(shape: Shape | None) -> str:
    return "one process" if shape is None else f"{shape[0]}x{shape[1]} ranks"
