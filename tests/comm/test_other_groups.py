"""torch's fake process group, which sends nothing, in a process of its own. Threads as ranks: `tests/simulation`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed._local_tensor import LocalTensorMode
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

import convmesh
from tests.launch import launch


def check_fake(_: DeviceMesh) -> None:
    """Shapes are those of real ranks: also where a rank sends nothing, and something is for it."""
    dist.destroy_process_group()
    convmesh.enable()
    functions: list[Callable[[Any], Any]] = [
        lambda x: x[4:], lambda x: x[:3], lambda x: x[7], lambda x: x.flip(0), lambda x: x.roll(3, 0),
        lambda x: torch.cat([x, x]), lambda x: x.t().reshape(-1), lambda x: x.sum(), lambda x: x.unfold(0, 3, 1),
    ]  # fmt: skip
    for rank in range(4):
        dist.init_process_group("fake", rank=rank, world_size=4, store=FakeStore())
        mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("h",))
        for whole in (torch.rand(8, 3), torch.rand(9, 3) + rank):
            x = convmesh.shard(whole, mesh, h=0).requires_grad_()
            for function in functions:
                y = function(x)
                assert y.shape == function(whole).shape
                assert y.to_local().shape == distribute_tensor(function(whole), mesh, y.placements).to_local().shape
                y.sum().backward()
        dist.destroy_process_group()
    dist.init_process_group("fake", rank=0, world_size=4, store=FakeStore())
    with LocalTensorMode(4):
        mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("h",))
        x, w = (distribute_tensor(torch.rand(4, 3, 8, 8), mesh, [p]) for p in (Shard(2), Replicate()))
        for attempt in (lambda: F.conv2d(x, w), lambda: x.sum(), lambda: convmesh.shard(torch.rand(8), mesh, h=0)):
            with pytest.raises(convmesh.ShardingError, match="LocalTensorMode"):
                attempt()


def test_a_group_that_sends_nothing() -> None:
    (outcome,) = launch(check_fake, mesh=(1,), names=("one",))
    assert outcome.error is None, outcome.message
