"""The options of `convmesh selftest`. Imports none of its packages."""

from __future__ import annotations

import argparse
from pathlib import Path


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--ranks", type=int, help="how many processes to start where torchrun has started none "
                        "(default: one for each GPU, at least 2)")  # fmt: skip
    parser.add_argument("--out", type=Path, default=Path("selftest"), help="the folder for the page, its text, and the "
                        "device's figures for `convmesh plan --device` (default: selftest)")  # fmt: skip
    parser.add_argument("--only", nargs="+", metavar="FUNCTION", help="compare these functions with one device, as the "
                        "report names them, to look at what was wrong (default: some of every family)")  # fmt: skip
    parser.add_argument("--quick", action="store_true", help="small sizes and few repetitions: for a test of the test")
