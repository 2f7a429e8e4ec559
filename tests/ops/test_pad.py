"""Padding along sharded dimensions, against one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from tests.harness import Pool
from tests.ops.against_dense import Sharded, check


def pad(x: torch.Tensor, pads: tuple[int, ...], mode: str, value: float | None) -> torch.Tensor:
    return F.pad(x, pads, mode, value)


def cases(*placements: tuple[Any, ...]) -> list[Sharded]:
    made = []
    for at in placements:
        for pads, value in (((1, 2), 0.0), ((1, 2, 0, 3), 2.5), ((-1, 2, 3, -2), 1.0), ((-2, -2, -1, -1), 0.0),
                            ((0, 9, 9, 0), 1.0), ((1, 1, 1, 1, 1, 1, 0, 2), 3.0), ((0, 0), 1.0)):  # fmt: skip
            made.append(Sharded(pad, (((2, 3, 5, 7), at),), (pads, "constant", value)))
        for mode in ("reflect", "replicate", "circular"):
            for pads in ((1, 2, 0, 3), (2, 0, 1, 1), (-1, 2, 3, -2), (4, 4, 4, 4)):
                made.append(Sharded(pad, (((2, 3, 5, 7), at),), (pads, mode, None)))
    return made


@pytest.mark.parametrize(
    ("mesh", "placements"),
    [
        ((2,), [(3,), (2,), (0,), ("P",), ("R",), (1,)]),
        ((4,), [(3,), (2,), (1,)]),
        ((2, 2), [(2, 3), (0, 3), (3, 3), ("P", 2), (3, 2)]),
    ],
)
def test_padding_is_that_of_one_process(pool: Pool, mesh: tuple[int, ...], placements: list[Any]) -> None:
    pool.run_cases(check, cases(*placements), mesh=mesh)
