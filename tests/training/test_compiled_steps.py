"""`torch.compile(fullgraph=True)` of whole training steps: the gradients of eager code, to rounding."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn
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


def compare(mesh: DeviceMesh, build: Callable[[], nn.Module], shape: tuple[int, ...], backend: str) -> None:
    convmesh.enable()
    warnings.simplefilter("ignore")  # a compiler imports what is deprecated
    torch.manual_seed(0)
    model = convmesh.distribute(build().double(), mesh)
    x = convmesh.shard(torch.randn(shape, dtype=torch.float64), mesh, h=2)
    dense = isinstance(model, UNet)
    labels = torch.randint(3, (shape[0], *shape[2:]) if dense else shape[:1])
    target = convmesh.shard(labels, mesh, **({"h": 1} if dense else {}))

    def step(x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(model(x), target)

    def gradients(function: Callable[..., torch.Tensor]) -> list[torch.Tensor]:
        model.zero_grad()
        loss = function(x, target)
        loss.backward()
        found = [parameter.grad for parameter in model.parameters()]
        return [tensor.full_tensor() for tensor in (loss.detach(), *found)]  # type: ignore[union-attr]

    eager = gradients(step)
    compiled = torch.compile(step, backend=backend, fullgraph=True)
    for _ in range(2):  # the second time by what was compiled
        for one, other in zip(gradients(compiled), eager, strict=True):
            assert_close(one, other)


@pytest.mark.parametrize("build", NETWORKS, ids=lambda build: build.__name__)
def test_by_aot_autograd(pool: Pool, build: Callable[[], nn.Module]) -> None:
    pool.run(compare, build, NETWORKS[build], "aot_eager", mesh=(2,), names=("h",))


@pytest.mark.slow
@pytest.mark.long("inductor compiles for a minute")
def test_by_inductor(pool: Pool) -> None:
    pool.run(compare, unet2d, NETWORKS[unet2d], "inductor", mesh=(2,), names=("h",), timeout=600)
