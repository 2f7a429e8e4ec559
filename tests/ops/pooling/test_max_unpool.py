"""Max unpooling of what max pooling gave, on DTensors against one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh

import convmesh
from tests.cases import place
from tests.compare import assert_close
from tests.gathers import Sizes, is_sent_whole
from tests.harness import Pool
from tests.ops.pooling.windows import letters


def check_unpool(mesh: DeviceMesh, case: tuple[Any, ...]) -> None:
    at, spatial, options = case
    shape = {1: (2, 3, 12), 2: (2, 3, 8, 9), 3: (2, 1, 4, 6, 5)}[spatial]
    x = torch.randn(shape, generator=torch.Generator().manual_seed(5), dtype=torch.float64)

    def both(x: torch.Tensor) -> torch.Tensor:
        values, indices = getattr(F, f"max_pool{spatial}d")(x, **options, return_indices=True)
        result: torch.Tensor = getattr(F, f"max_unpool{spatial}d")(values, indices, **options, output_size=shape[2:])
        return result

    dense = x.clone().requires_grad_()
    with Sizes() as one:
        expected = both(dense)
    gradient = torch.randn(shape, generator=torch.Generator().manual_seed(6), dtype=torch.float64)
    expected.backward(gradient)
    with convmesh.enable():
        placed = place(x, mesh, at).requires_grad_()
        with Sizes() as many:
            actual = both(placed)
        seed = place(gradient, mesh, letters(actual))
        with many:
            actual.backward(seed)
        assert min(shape[:2]) < mesh.size() or not is_sent_whole(one, many, [(x, at)]), many.replicated_at_once
        assert letters(actual) == tuple("R" if p == "P" else p for p in at)
        assert_close(actual.full_tensor(), expected)
    assert placed.grad is not None
    assert_close(placed.grad.full_tensor(), dense.grad)


@pytest.mark.parametrize("mesh", [(2,), (2, 2)])
def test_max_unpool(pool: Pool, mesh: tuple[int, ...]) -> None:
    places: dict[tuple[int, ...], list[tuple[Any, ...]]] = {
        (2,): [(0,), (1,), (2,), (-1,), ("P",)],
        (2, 2): [(0, 2), (2, -1), (2, 2)],
    }
    cases = [
        (tuple(spatial + 1 if p == -1 else p for p in at), spatial, options)
        for at in places[mesh]
        for spatial in (1, 2, 3)
        for options in ({"kernel_size": 2}, {"kernel_size": 3, "stride": 2, "padding": 1})
    ]
    pool.run_cases(check_unpool, cases, mesh=mesh)
