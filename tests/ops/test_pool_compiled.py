"""Pooling and resampling under torch.compile."""

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

FUNCTIONS: dict[str, Any] = {
    "max": lambda x: F.max_pool2d(x, 3, 2, 1),
    "nearest": lambda x: F.interpolate(x, scale_factor=2),
    "bilinear": lambda x: F.interpolate(x, scale_factor=1.7, mode="bilinear"),
}


def check_compiled(mesh: DeviceMesh, name: str) -> None:
    function = FUNCTIONS[name]
    x = torch.randn(2, 4, 11, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    dense = x.clone().requires_grad_()
    expected = function(dense)
    (expected * expected).sum().backward()
    with convmesh.enable():
        torch._dynamo.reset()
        placed = place(x, mesh, (2,)).requires_grad_()
        actual = torch.compile(function, fullgraph=True, backend="aot_eager")(placed)
        (actual * actual).sum().backward()
    assert_close(actual.full_tensor(), expected)
    assert_close(placed.grad.full_tensor(), dense.grad)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_compiled(pool: Pool, name: str) -> None:
    pool.run(check_compiled, name, mesh=(2,))
