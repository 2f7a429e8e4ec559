"""Convolutions that are dilated by more than a rank holds, against one process: taps read padding, or another rank."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.cases import Case, check, random_case
from tests.harness import Pool

SEEDS = range(0, 24, 2)


def far_reaching(seed: int, mesh: tuple[int, ...]) -> Case:
    """Random operands, strides and placements, and three taps a dimension, about as far apart as it is long."""
    case = random_case(seed, mesh)
    spatial = len(case.size)
    dilation, size = (5 + seed % 13,) * spatial, tuple(9 + (seed + axis) % 5 for axis in range(spatial))
    return replace(
        case, batch=2, size=size, kernel=(3,) * spatial, padding=dilation, dilation=dilation,
        stride=case.stride if seed % 4 == 0 else (1,) * spatial, output_padding=(0,) * spatial,
        dtype=torch.bfloat16 if seed % 5 == 0 else torch.float64,
        input=tuple(2 + axis % spatial for axis in range(len(mesh))), weight=("R",) * len(mesh),
    )  # fmt: skip


@pytest.mark.parametrize("mesh", [(2,), (4,), (2, 2)])
def test_far_reaching_windows(pool: Pool, mesh: tuple[int, ...]) -> None:
    pool.run_cases(check, [far_reaching(seed, mesh) for seed in SEEDS], mesh=mesh)
