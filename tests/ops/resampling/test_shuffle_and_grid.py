"""Pixel shuffling, grid sampling and affine grids on DTensors against one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh

import convmesh
from tests.cases import place
from tests.compare import assert_close
from tests.harness import Pool
from tests.ops.pooling.windows import Call, check_call, letters

PLACES: dict[tuple[int, ...], list[tuple[Any, ...]]] = {
    (2,): [(0,), (1,), (2,), (3,), ("P",)],
    (4,): [(1,), (2,), (3,)],
    (2, 2): [(0, 2), (2, 3), (3, 3), (1, 1), (1, 2), ("P", 3)],
}


@pytest.mark.parametrize("mesh", PLACES)
def test_pixel_shuffle(pool: Pool, mesh: tuple[int, ...]) -> None:
    cases = [
        Call(name, shape, at, (factor,))
        for name, shape, factor in (
            ("pixel_shuffle", (2, 12, 5, 7), 2),
            ("pixel_shuffle", (2, 16, 4, 4), 2),
            ("pixel_unshuffle", (2, 3, 9, 6), 3),
        )
        for at in PLACES[mesh]
    ]
    pool.run_cases(check_call, cases, mesh=mesh)


def check_sampling(mesh: DeviceMesh, case: tuple[Any, ...]) -> None:
    input_at, grid_at, spatial, mode, padding, align = case
    generator = torch.Generator().manual_seed(5)
    sizes = {2: ((5, 6), (7, 3)), 3: ((4, 3, 5), (3, 5, 2))}[spatial]
    x = torch.randn(2, 3, *sizes[0], generator=generator, dtype=torch.float64)
    grid = torch.rand(2, *sizes[1], spatial, generator=generator, dtype=torch.float64) * 2.4 - 1.2
    gradient = torch.randn(2, 3, *sizes[1], generator=generator, dtype=torch.float64)
    dense = (x.clone().requires_grad_(), grid.clone().requires_grad_())
    expected = F.grid_sample(*dense, mode=mode, padding_mode=padding, align_corners=align)
    expected.backward(gradient)
    with convmesh.enable():
        placed = (place(x, mesh, input_at).requires_grad_(), place(grid, mesh, grid_at).requires_grad_())
        actual = F.grid_sample(*placed, mode=mode, padding_mode=padding, align_corners=align)
        actual.backward(place(gradient, mesh, letters(actual)))
        with torch.inference_mode():
            again = F.grid_sample(*placed, mode=mode, padding_mode=padding, align_corners=align)
            assert_close(again.full_tensor(), expected.detach())
    assert_close(actual.full_tensor(), expected.detach())
    for one, other in zip(placed, dense, strict=True):
        assert one.grad is not None
        assert other.grad is not None
        assert_close(one.grad.full_tensor(), other.grad)


@pytest.mark.parametrize("mesh", [(2,), (2, 2)])
def test_grid_sample(pool: Pool, mesh: tuple[int, ...]) -> None:
    places = {
        (2,): [((0,), (0,)), ((1,), ("R",)), (("R",), (1,)), ((2,), (1,)), (("P",), ("R",)),
               ((3,), ("P",)), ((0,), (3,))],
        (2, 2): [((0, 1), (0, "R")), ((0, 2), (0, 1)), ((2, 3), (1, 2)), (("P", 0), ("R", 0))],
    }[mesh]  # fmt: skip
    styles = [(2, "bilinear", "zeros", False), (2, "bicubic", "border", True), (3, "nearest", "reflection", False)]
    cases = [(*at, *style) for at in places for style in styles]
    pool.run_cases(check_sampling, cases, mesh=mesh)


def check_affine(mesh: DeviceMesh, case: tuple[Any, ...]) -> None:
    at, gradient_at, spatial, align = case
    generator = torch.Generator().manual_seed(5)
    theta = torch.randn(3, spatial, spatial + 1, generator=generator, dtype=torch.float64)
    size = [3, 1, 5, 7, 4][: spatial + 2]
    dense = theta.clone().requires_grad_()
    expected = F.affine_grid(dense, size, align_corners=align)
    gradient = torch.randn(expected.shape, generator=generator, dtype=torch.float64)
    expected.backward(gradient)
    with convmesh.enable():
        placed = place(theta, mesh, at).requires_grad_()
        actual = F.affine_grid(placed, size, align_corners=align)
        actual.backward(place(gradient, mesh, gradient_at or letters(actual)))
    assert_close(actual.full_tensor(), expected.detach())
    assert placed.grad is not None
    assert dense.grad is not None
    assert_close(placed.grad.full_tensor(), dense.grad)


def test_affine_grid(pool: Pool) -> None:
    cases = [
        (at, gradient_at, spatial, align)
        for at, gradient_at in (
            ((0,), None),
            (("R",), (1,)),
            (("R",), (2,)),
            (("P",), None),
            ((1,), None),
            ((2,), None),
        )
        for spatial in (2, 3)
        for align in (False, True)
    ]
    pool.run_cases(check_affine, cases, mesh=(2,))
