"""Resampling on DTensors against one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from convmesh.geometry import Interval
from convmesh.ops.resampling.gathered import Along, along_block
from tests.harness import Pool
from tests.ops.pooling.windows import PLACES, Call, check_call, placed_calls

SHAPES = {1: (2, 3, 11), 2: (2, 3, 7, 9), 3: (2, 1, 5, 4, 7)}
MODES = [
    *[("nearest", d, {}) for d in (1, 2, 3)],
    *[("nearest-exact", d, {}) for d in (1, 2, 3)],
    *[(mode, d, {"align_corners": align}) for d, mode in ((1, "linear"), (2, "bilinear"), (3, "trilinear"))
      for align in (False, True)],
    *[("bicubic", 2, {"align_corners": align}) for align in (False, True)],
    *[(mode, 2, {"antialias": True}) for mode in ("bilinear", "bicubic")],
    *[("area", d, {}) for d in (1, 2, 3)],
]  # fmt: skip
SIZES: list[dict[str, Any]] = [{"scale_factor": 2}, {"scale_factor": 0.6}, {"scale_factor": 1.7}, {"size": 5}]


def calls() -> list[Call]:
    return [
        Call("interpolate", SHAPES[d], kwargs=(("mode", mode), *options.items(), *size.items()))
        for mode, d, options in MODES
        for size in SIZES
    ]


@pytest.mark.parametrize("mesh", PLACES)
def test_interpolate(pool: Pool, mesh: tuple[int, ...]) -> None:
    pool.run_cases(check_call, placed_calls(mesh, calls()), mesh=mesh, share=1 / 3)


def test_factors_beside_the_sizes_that_they_give(pool: Pool) -> None:
    """Some of torch's kernels go by the factor, and others by the sizes, where these are equal or one is twice the
    other; a rank's own part can be so where the whole is not."""
    cases = [
        Call("interpolate", shape, (dim,), (), (("mode", mode), ("scale_factor", factor)))
        for shape, modes in (
            ((1, 5, 20), ("nearest", "nearest-exact", "linear")),
            ((1, 5, 14, 20), ("nearest", "bilinear", "bicubic")),
            ((1, 5, 80, 60), ("nearest",)),
            ((1, 5, 4, 12, 9), ("nearest", "trilinear")),
        )
        for mode in modes
        for dim in (2, len(shape) - 1)
        for factor in (0.97, 1.04, 1.97, 2.03, 2.1)
    ]
    pool.run_cases(check_call, cases, mesh=(4,), share=1 / 2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_other_dtypes(pool: Pool, dtype: torch.dtype) -> None:
    cases = [
        Call("interpolate", (2, 8, 13, 6), (2,), (), (("mode", mode), ("scale_factor", 1.7)), dtype, channels_last=last)
        for mode in ("nearest", "bilinear", "bicubic")
        for last in (False, True)
    ]
    pool.run_cases(check_call, cases, mesh=(2,))


def test_a_block_is_little_more_than_what_is_read() -> None:
    """Sizes without a common divisor begin together only once: a block of these would be all of the tensor."""
    twice = along_block(Interval(7, 17), Interval(16, 32), 32, 64)
    assert twice == Along(Interval(7, 17), Interval(14, 34))
    half = along_block(Interval(15, 33), Interval(8, 16), 64, 32)
    assert half == Along(Interval(14, 34), Interval(7, 17))
    assert along_block(Interval(7, 13), Interval(9, 18), 17, 23) is None
    assert along_block(Interval(0, 9), Interval(0, 8), 10, 16) is None
