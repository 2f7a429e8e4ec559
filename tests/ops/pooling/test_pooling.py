"""Pooling on DTensors against one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh

import convmesh
from tests.cases import place
from tests.compare import assert_close, same_on_all_ranks
from tests.gathers import MOST, Sizes
from tests.harness import Pool
from tests.ops.pooling.windows import PLACES, Call, check_call, placed_calls

SHAPES = {1: (3, 2, 13), 2: (3, 2, 7, 9), 3: (2, 2, 5, 7, 4)}
MAX_CASES = [
    ({"kernel_size": 2}, (1, 2, 3)),
    ({"kernel_size": 3, "stride": 2, "padding": 1}, (1, 2, 3)),
    ({"kernel_size": 3, "stride": 1, "padding": 1, "dilation": 2}, (2,)),
    ({"kernel_size": 2, "stride": 1}, (2,)),
    ({"kernel_size": 4, "stride": 2, "padding": 2, "ceil_mode": True}, (2,)),
    ({"kernel_size": 3, "stride": 4, "ceil_mode": True}, (1, 2)),
    ({"kernel_size": 5, "stride": 1, "padding": 2}, (2,)),
    ({"kernel_size": 40, "padding": 1, "ceil_mode": True}, (1, 2)),
    ({"kernel_size": 9, "dilation": 3, "stride": 30, "padding": 2, "ceil_mode": True}, (2,)),
]
AVG_CASES = [
    ({"kernel_size": 2}, (1, 2, 3)),
    ({"kernel_size": 3, "stride": 2, "padding": 1}, (1, 2, 3)),
    ({"kernel_size": 3, "stride": 2, "padding": 1, "ceil_mode": True}, (1, 2, 3)),
    ({"kernel_size": 3, "stride": 2, "padding": 1, "ceil_mode": True, "count_include_pad": False}, (1, 2, 3)),
    ({"kernel_size": 3, "stride": 1, "padding": 1, "divisor_override": 5}, (2, 3)),
    ({"kernel_size": 4, "stride": 3, "padding": 2, "ceil_mode": True}, (2,)),
    ({"kernel_size": 40, "padding": 1, "ceil_mode": True}, (1, 2)),
    ({"kernel_size": 40, "padding": 1, "ceil_mode": True, "count_include_pad": False}, (2,)),
    ({"kernel_size": 40, "ceil_mode": True, "divisor_override": 5}, (2,)),
]


def calls(function: str, cases: list[Any], **extra: Any) -> list[Call]:
    return [
        Call(f"{function}{d}d", SHAPES[d], kwargs=(*options.items(), *extra.items()))
        for options, spatials in cases
        for d in spatials
    ]


@pytest.mark.parametrize("mesh", PLACES)
def test_max_pool(pool: Pool, mesh: tuple[int, ...]) -> None:
    pool.run_cases(
        check_call, placed_calls(mesh, calls("max_pool", MAX_CASES, return_indices=True)), mesh=mesh, share=1 / 2
    )


@pytest.mark.parametrize("mesh", PLACES)
def test_avg_pool(pool: Pool, mesh: tuple[int, ...]) -> None:
    pool.run_cases(check_call, placed_calls(mesh, calls("avg_pool", AVG_CASES)), mesh=mesh, share=1 / 2)


ADAPTIVE_SIZES = [(1, (4, 13, 5, 1, 20)), (2, ((7, 3), (3, 4), (1, 5), 2)), (3, (2, (5, 3, 1), (2, 9, 3)))]


@pytest.mark.parametrize("mesh", PLACES)
@pytest.mark.parametrize("kind", ["avg", "max"])
def test_adaptive_pool(pool: Pool, mesh: tuple[int, ...], kind: str) -> None:
    extra = (("return_indices", True),) if kind == "max" else ()
    cases = [
        Call(f"adaptive_{kind}_pool{d}d", SHAPES[d], (), (size,), extra)
        for d, sizes in ADAPTIVE_SIZES
        for size in sizes
        if (kind, size) != ("avg", 1)  # torch makes this a mean, which is no pooling
    ]
    pool.run_cases(check_call, placed_calls(mesh, cases), mesh=mesh, share=1 / 2)


def check_special(mesh: DeviceMesh, name: str) -> None:
    """NaN wins, the first of equal values is taken, and a window of nothing but -inf points at its first index."""
    x = torch.zeros(1, 1, 8, 6, dtype=torch.float64)
    x[..., 2, 3] = x[..., 5, 1] = x[..., 5, 2] = torch.nan
    x[..., 6:, :] = -torch.inf
    options: dict[str, Any] = {"output_size": (3, 2)} if "adaptive" in name else {"kernel_size": 3, "padding": 1}
    expected = getattr(F, name)(x, **options, return_indices=True)
    with convmesh.enable():
        for at in (2, 3):
            actual = getattr(F, name)(place(x, mesh, (at,)), **options, return_indices=True)
            for one, other in zip(actual, expected, strict=True):
                assert_close(one.full_tensor(), other)


@pytest.mark.parametrize("name", ["max_pool2d", "adaptive_max_pool2d"])
def test_what_is_not_a_number(pool: Pool, name: str) -> None:
    pool.run(check_special, name, mesh=(4,))


def check_errors(mesh: DeviceMesh) -> str:
    x = place(torch.zeros(1, 1, 3, 8), mesh, (3,))
    with convmesh.enable():
        with pytest.raises(convmesh.ShardingError, match="too small") as error:
            F.max_pool2d(x, 5)
        assert F.max_pool2d(x, 2).shape == (1, 1, 1, 4)
    return str(error.value)


def test_errors_are_alike_on_all_ranks(pool: Pool) -> None:
    assert "remedy" in same_on_all_ranks(pool.run(check_errors, mesh=(4,)))


def check_wide(mesh: DeviceMesh) -> None:
    """As some classifiers have it: a kernel as wide as there are channels, over the few pixels that are left."""
    x = torch.randn(2, 320, 2, 4, dtype=torch.float64)
    with convmesh.enable():
        placed = place(x, mesh, (3,)).requires_grad_()
        with Sizes() as sizes:
            F.avg_pool2d(placed, 320, ceil_mode=True).mean().backward()
            F.max_pool2d(placed, 320, ceil_mode=True).mean().backward()
    assert sizes.largest <= x.nbytes, sizes.maker


def test_a_window_that_is_wider_than_everything_makes_no_padding(pool: Pool) -> None:
    pool.run(check_wide, mesh=(2,))


def check_lp(mesh: DeviceMesh) -> None:
    x = torch.rand(2, 2, 9, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    with convmesh.enable():
        placed = place(x, mesh, (2,))
        with Sizes() as sizes:
            actual = F.lp_pool2d(placed, 2.0, 3, 2)
    assert sizes.received < MOST * x.nbytes
    assert_close(actual.full_tensor(), F.lp_pool2d(x, 2.0, 3, 2))


def test_lp_pool_stays_sharded(pool: Pool) -> None:
    pool.run(check_lp, mesh=(2,))
