"""Gradients are summed over ranks, and are those of one process: what docs/from-ddp.md says about rescaling a loss."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import convmesh
from tests.compare import assert_close
from tests.harness import Pool

# Images and labels are sharded unevenly, over both mesh dimensions, over one, or over none.
LAYOUTS: list[dict[str, int]] = [{"data": 0, "h": 2}, {"data": 0}, {"h": 2}, {}]
OPTIONS: list[dict[str, Any]] = [
    {}, {"reduction": "sum"}, {"ignore_index": 1}, {"label_smoothing": 0.1},
    {"weight": torch.tensor([1.0, 2.0, 0.5], dtype=torch.float64), "ignore_index": 0, "label_smoothing": 0.2},
]  # fmt: skip


def network() -> nn.Module:
    torch.manual_seed(1)
    return nn.Conv2d(1, 3, 3, padding=1).double()


def data() -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    return torch.randn(5, 1, 7, 8, dtype=torch.float64), torch.randint(3, (5, 7, 8))


def assert_same_gradients(model: nn.Module, expected: nn.Module) -> None:
    for actual, wanted in zip(model.parameters(), expected.parameters(), strict=True):
        assert actual.grad is not None
        assert wanted.grad is not None
        assert_close(actual.grad.full_tensor(), wanted.grad)


def cross_entropies(mesh: DeviceMesh, dims: dict[str, int]) -> None:
    images, labels = data()
    x, y = (
        convmesh.shard(images, mesh, **dims),
        convmesh.shard(labels, mesh, **{n: dim // 2 for n, dim in dims.items()}),
    )
    for options in OPTIONS:
        expected, model = network(), convmesh.distribute(network(), mesh)
        F.cross_entropy(expected(images), labels, **options).backward()
        placed = {n: convmesh.shard(v, mesh) if isinstance(v, torch.Tensor) else v for n, v in options.items()}
        F.cross_entropy(model(x), y, **placed).backward()
        assert_same_gradients(model, expected)


def other_losses(mesh: DeviceMesh, dims: dict[str, int]) -> None:
    """Of a rank's own part, scaled by its share; and of the full tensor."""
    images, _ = data()
    expected = network()
    expected(images).square().mean().backward()
    x = convmesh.shard(images, mesh, **dims)

    model = convmesh.distribute(network(), mesh)
    output = model(x)
    local = output.to_local()
    (local.square().mean() * (local.numel() / output.numel())).backward()
    assert_same_gradients(model, expected)

    model = convmesh.distribute(network(), mesh)
    model(x).full_tensor().square().mean().backward()
    assert_same_gradients(model, expected)


@pytest.mark.parametrize("dims", LAYOUTS, ids=str)
def test_gradients_of_sharded_losses_are_those_of_one_process(pool: Pool, dims: dict[str, int]) -> None:
    pool.run(cross_entropies, dims, mesh=(2, 2), names=("data", "h"))
    pool.run(other_losses, dims, mesh=(2, 2), names=("data", "h"))
