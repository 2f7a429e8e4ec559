"""Recurrent layers against one process: batch, time and features sharded, and results sharded as their input."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import convmesh
from tests.compare import assert_close


def build(kind: str, batch_first: bool) -> nn.Module:
    torch.manual_seed(0)
    made: nn.Module = getattr(nn, kind)(6, 8, 2, batch_first=batch_first, bidirectional=not batch_first).double()
    return made


def gradients(model: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    """Result, and gradients of the input and of all parameters."""
    y = model(x)[0]
    y.sin().mean().backward()
    return [y.detach(), x.grad, *(p.grad for p in model.parameters())]  # type: ignore[list-item]


def on_ranks(mesh: DeviceMesh, kind: str, batch_first: bool, x: torch.Tensor, dim: int) -> None:
    expected = gradients(build(kind, batch_first), x.clone().requires_grad_())
    with convmesh.enable():
        given = convmesh.shard(x, mesh, m=dim).requires_grad_()
        made = gradients(convmesh.distribute(build(kind, batch_first), mesh), given)
        assert made[0].placements == given.placements or x.shape[not batch_first] == 1  # type: ignore[attr-defined]
        for actual, one in zip(made, expected, strict=True):
            assert_close(actual.full_tensor(), one)  # type: ignore[attr-defined]
        with torch.inference_mode():
            assert_close(
                convmesh.distribute(build(kind, batch_first), mesh)(given.detach())[0].full_tensor(), expected[0]
            )


@pytest.mark.parametrize("dim", [0, 1, 2])
@pytest.mark.parametrize(("kind", "batch_first"), [("LSTM", True), ("GRU", True), ("RNN", False)])
def test_a_layer(kind: str, batch_first: bool, dim: int) -> None:
    x = torch.randn(4, 5, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    convmesh.simulate(lambda mesh: on_ranks(mesh, kind, batch_first, x, dim), mesh=(3,), names=("m",))


def test_one_sample() -> None:
    x = torch.randn(1, 5, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    convmesh.simulate(lambda mesh: on_ranks(mesh, "LSTM", True, x, 1), mesh=(2,), names=("m",))
