"""The options of `convmesh demo`. Imports none of the demo's packages."""

from __future__ import annotations

import argparse
from pathlib import Path

from .settings import PICTURES, Settings, Shape, mesh_shape


def add_options(parser: argparse.ArgumentParser) -> None:
    usual = Settings()
    parser.add_argument(
        "--mesh",
        type=_shape,
        nargs="+",
        default=[(1, 2), (2, 2)],
        metavar="HxW",
        help="ranks along the height x ranks along the width, one mesh or several (default: 1x2 2x2)",
    )
    parser.add_argument("--steps", type=_positive, default=usual.steps, help=f"default: {usual.steps}")
    parser.add_argument("--picture", choices=PICTURES, default=usual.picture, help=f"default: {usual.picture}")
    parser.add_argument("--crop", type=_positive, help="only a square of this side, from the middle of the picture")
    parser.add_argument("--double", action="store_true", help="in float64")
    parser.add_argument("--seed", type=int, default=usual.seed, help=f"default: {usual.seed}")
    parser.add_argument("--mesh-only", action="store_true", help="without one process to compare with")
    parser.add_argument("--out", type=Path, default=Path("demo/report.html"), help="default: demo/report.html")


def _shape(text: str) -> Shape:
    try:
        return mesh_shape(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _positive(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no positive whole number")
    return int(text)
