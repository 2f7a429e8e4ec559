"""Process groups that are no processes: threads as ranks, and torch's fake group, which sends nothing.

Each test runs in a process of its own, since these change the process that they are in.
"""

from __future__ import annotations

import copy
import threading
import traceback
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed._local_tensor import LocalTensorMode
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.testing._internal.distributed.multi_threaded_pg import ProcessLocalGroup, _install_threaded_pg

import convmesh
from tests.compare import assert_close
from tests.launch import launch

NAMES = ("h", "w")


class Net(nn.Module):
    """Convolutions, pooling and norms, a slice, and a constant."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 4, 3, padding=1, bias=False)  # before a norm its gradient is rounding
        self.second = nn.Conv2d(4, 6, 4, 2, 1, groups=2, bias=False)
        self.norms = nn.ModuleList([nn.BatchNorm2d(4), nn.GroupNorm(2, 6), nn.LocalResponseNorm(3)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.avg_pool2d(F.max_pool2d(self.norms[0](self.first(x)).relu(), 3, 1, 1), 2, 1)
        y = y * torch.linspace(0, 1, 4, dtype=x.dtype).view(1, 4, 1, 1)
        return self.norms[2](self.norms[1](self.second(y)))[:, :, 1:]


def as_threads(ranks: int, run: Callable[[DeviceMesh], Any]) -> list[Any]:
    """What `run` gives on every rank of a mesh of threads."""
    dist.destroy_process_group()
    _install_threaded_pg()
    torch._C._distributed_c10d._set_thread_isolation_mode(True)
    store, results, errors = dist.HashStore(), {}, {}

    def rank(number: int) -> None:
        try:
            dist.init_process_group("threaded", rank=number, world_size=ranks, store=store)
            results[number] = run(init_device_mesh("cpu", (2, ranks // 2), mesh_dim_names=NAMES))
        except BaseException as error:
            errors[number] = traceback.format_exc()
            ProcessLocalGroup.exception_handle(error)  # else the others would wait for it

    threads = [threading.Thread(target=rank, args=(number,), daemon=True) for number in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(100)
    assert not errors, next(iter(errors.values()))
    return [results[number] for number in range(ranks)]


def check_threads(_: DeviceMesh, ranks: int) -> None:
    torch.manual_seed(0)
    net, x = Net().double(), torch.randn(2, 3, 13, 11, dtype=torch.float64)
    expected = copy.deepcopy(net)
    wanted = expected(x)
    wanted.square().sum().backward()

    def train(mesh: DeviceMesh) -> list[torch.Tensor]:
        model = convmesh.distribute(copy.deepcopy(net), mesh)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        y = model(convmesh.shard(x, mesh, h=2, w=3))
        y.square().sum().backward()
        results = [y.full_tensor(), *(parameter.grad.full_tensor() for parameter in model.parameters())]
        optimizer.step()
        with pytest.raises(convmesh.ShardingError, match="different values"):
            convmesh.shard(x + mesh.get_rank(), mesh, h=2)
        return results

    for found in as_threads(ranks, train):
        for actual, one in zip(found, [wanted, *(p.grad for p in expected.parameters())], strict=True):
            assert one is not None
            assert_close(actual.detach(), one.detach())


@pytest.mark.parametrize("ranks", [4, 8])
def test_threads_are_ranks(ranks: int) -> None:
    (outcome,) = launch(check_threads, ranks, mesh=(1,), names=("one",))
    assert outcome.error is None, outcome.message


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
