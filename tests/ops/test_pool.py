"""Pooling on DTensors against one process."""

from __future__ import annotations

from typing import Any

import pytest

from tests.harness import Pool
from tests.ops.pooling import Call, check_call

SHAPES = {1: (3, 2, 13), 2: (3, 2, 7, 9), 3: (2, 2, 5, 7, 4)}
PLACES: dict[tuple[int, ...], list[Any]] = {
    (2,): [lambda d: (2,), lambda d: (d + 1,), lambda d: (0,), lambda d: (1,), lambda d: ("P",)],
    (4,): [lambda d: (2,), lambda d: (d + 1,)],
    (2, 2): [lambda d: (0, 2), lambda d: (2, d + 1), lambda d: (2, 2), lambda d: ("P", d + 1)],
}

MAX_CASES = [
    ({"kernel_size": 2}, (1, 2, 3)),
    ({"kernel_size": 3, "stride": 2, "padding": 1}, (1, 2, 3)),
    ({"kernel_size": 3, "stride": 1, "padding": 1, "dilation": 2}, (2,)),
    ({"kernel_size": 2, "stride": 1}, (2,)),
    ({"kernel_size": 4, "stride": 2, "padding": 2, "ceil_mode": True}, (2,)),
    ({"kernel_size": 3, "stride": 4, "ceil_mode": True}, (1, 2)),
    ({"kernel_size": 5, "stride": 1, "padding": 2}, (2,)),
]
AVG_CASES = [
    ({"kernel_size": 2}, (1, 2, 3)),
    ({"kernel_size": 3, "stride": 2, "padding": 1}, (1, 2, 3)),
    ({"kernel_size": 3, "stride": 2, "padding": 1, "ceil_mode": True}, (1, 2, 3)),
    ({"kernel_size": 3, "stride": 2, "padding": 1, "ceil_mode": True, "count_include_pad": False}, (1, 2, 3)),
    ({"kernel_size": 3, "stride": 1, "padding": 1, "divisor_override": 5}, (2, 3)),
    ({"kernel_size": 4, "stride": 3, "padding": 2, "ceil_mode": True}, (2,)),
]


def calls(mesh: tuple[int, ...], function: str, cases: list[Any], **extra: Any) -> list[Call]:
    return [
        Call(f"{function}{d}d", SHAPES[d], at(d), (), (*options.items(), *extra.items()))
        for options, spatials in cases
        for d in spatials
        for at in PLACES[mesh]
    ]


@pytest.mark.parametrize("mesh", PLACES)
def test_max_pool(pool: Pool, mesh: tuple[int, ...]) -> None:
    pool.run_cases(check_call, calls(mesh, "max_pool", MAX_CASES, return_indices=True), mesh=mesh)


@pytest.mark.parametrize("mesh", PLACES)
def test_avg_pool(pool: Pool, mesh: tuple[int, ...]) -> None:
    pool.run_cases(check_call, calls(mesh, "avg_pool", AVG_CASES), mesh=mesh)


ADAPTIVE_SIZES = [(1, (4, 13, 5, 1, 20)), (2, ((7, 3), (3, 4), (1, 5), 2)), (3, (2, (5, 3, 1), (2, 9, 3)))]


@pytest.mark.parametrize("mesh", PLACES)
@pytest.mark.parametrize("kind", ["avg", "max"])
def test_adaptive_pool(pool: Pool, mesh: tuple[int, ...], kind: str) -> None:
    extra = (("return_indices", True),) if kind == "max" else ()
    cases = [
        Call(f"adaptive_{kind}_pool{d}d", SHAPES[d], at(d), (size,), extra)
        for d, sizes in ADAPTIVE_SIZES
        for size in sizes
        if (kind, size) != ("avg", 1)  # torch makes this a mean, which is no pooling
        for at in PLACES[mesh]
    ]
    pool.run_cases(check_call, cases, mesh=mesh)
