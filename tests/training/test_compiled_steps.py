"""`torch.compile(fullgraph=True)` of whole training steps: the gradients of eager code, to rounding."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from functorch.compile import make_boxed_func
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch.distributed.device_mesh import DeviceMesh

import convmesh
from convmesh.models import ConvNeXt, ResNet, UNet
from tests.compare import assert_close
from tests.harness import Pool


def convnext() -> nn.Module:
    return ConvNeXt((1, 1), (4, 6), num_classes=3)


def resnet() -> nn.Module:
    return ResNet((1, 1), use_bottleneck=True, num_classes=3, width=2)


def unet2d() -> nn.Module:
    return UNet(2, 3, 3, (3, 4), (2,), convs=1)


def unet3d() -> nn.Module:
    return UNet(3, 3, 3, (3, 4), (2,), convs=1)


NETWORKS: dict[Callable[[], nn.Module], tuple[int, ...]] = {
    convnext: (2, 3, 24, 16), resnet: (2, 3, 32, 16), unet2d: (2, 3, 11, 8), unet3d: (1, 3, 11, 4, 4),
}  # fmt: skip


class Training:
    def __init__(self, mesh: DeviceMesh, build: Callable[[], nn.Module], shape: tuple[int, ...]):
        torch._dynamo.reset()  # what it has seen of other networks makes sizes symbols
        convmesh.enable()
        warnings.simplefilter("ignore")  # a compiler imports what is deprecated
        torch.manual_seed(0)
        self.model = convmesh.distribute(build().double(), mesh)
        self.x = convmesh.shard(torch.randn(shape, dtype=torch.float64), mesh, h=2)
        dense = isinstance(self.model, UNet)
        labels = torch.randint(3, (shape[0], *shape[2:]) if dense else shape[:1])
        self.target = convmesh.shard(labels, mesh, **({"h": 1} if dense else {}))

    def step(self, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.model(x), target)

    def gradients(self, function: Callable[..., torch.Tensor]) -> list[torch.Tensor]:
        self.model.zero_grad()
        loss = function(self.x, self.target)
        loss.backward()
        found = [parameter.grad for parameter in self.model.parameters()]
        return [tensor.full_tensor() for tensor in (loss.detach(), *found)]  # type: ignore[union-attr]


def compare(mesh: DeviceMesh, build: Callable[[], nn.Module], shape: tuple[int, ...], backend: str) -> None:
    training = Training(mesh, build, shape)
    eager = training.gradients(training.step)
    compiled = torch.compile(training.step, backend=backend, fullgraph=True)
    for _ in range(2):  # the second time by what was compiled
        for one, other in zip(training.gradients(compiled), eager, strict=True):
            assert_close(one, other)


@pytest.mark.parametrize("build", NETWORKS, ids=lambda build: build.__name__)
def test_by_aot_autograd(pool: Pool, build: Callable[[], nn.Module]) -> None:
    pool.run(compare, build, NETWORKS[build], "aot_eager", mesh=(2,), names=("h",))


def operators(mesh: DeviceMesh, build: Callable[[], nn.Module], shape: tuple[int, ...]) -> list[list[str]]:
    """The names of those of the forward and the backward pass, in their order."""
    found: list[list[str]] = []

    def keep(graph: torch.fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        found.append([str(node.target) for node in graph.graph.nodes])
        return make_boxed_func(graph.forward)

    training = Training(mesh, build, shape)
    training.gradients(torch.compile(training.step, backend=aot_autograd(fw_compiler=keep), fullgraph=True))
    return found


@pytest.mark.parametrize("build", [convnext, unet2d], ids=lambda build: build.__name__)
def test_all_ranks_communicate_in_one_order(pool: Pool, build: Callable[[], nn.Module]) -> None:
    """On four ranks, some of which own nothing in the end. On one that always does little is there for the order."""
    by_rank = pool.run(operators, build, NETWORKS[build], mesh=(4,), names=("h",))
    sent = [[[name for name in one if "_c10d_functional" in name] for one in passes] for passes in by_rank]
    assert all(passes == sent[0] for passes in sent)
    assert [len(one) > 4 for one in sent[0]] == [True, True]
    assert sum("convmesh.nothing" in name for one in by_rank[0] for name in one) < sum(map(len, sent[0])) / 2


@pytest.mark.slow
@pytest.mark.long("inductor compiles for a minute")
def test_by_inductor(pool: Pool) -> None:
    pool.run(compare, unet2d, NETWORKS[unet2d], "inductor", mesh=(2,), names=("h",), timeout=600)
