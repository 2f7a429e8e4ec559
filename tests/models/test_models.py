"""The networks of convmesh.models: their shapes and sizes, and that a mesh trains them as one process does."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

import convmesh
from convmesh.models import ConvNeXt, ResNet, UNet, convnext_small, convnext_tiny, resnet18, resnet50
from tests.cases import place
from tests.compare import assert_close
from tests.gathers import Sizes, is_whole
from tests.harness import Pool

# As torchvision publishes them for its networks of these names.
PARAMETERS = {
    resnet18: 11_689_512,
    resnet50: 25_557_032,
    convnext_tiny: 28_589_128,
    convnext_small: 50_223_688,
}


@pytest.mark.parametrize("build", PARAMETERS)
def test_the_number_of_parameters_is_the_published_one(build: Callable[[], nn.Module]) -> None:
    with torch.device("meta"):
        model = build()
    assert sum(parameter.numel() for parameter in model.parameters()) == PARAMETERS[build]


@pytest.mark.parametrize("spatial_dims", [1, 2, 3])
def test_shapes(spatial_dims: int) -> None:
    size = (37, 34, 33)[:spatial_dims]
    x = torch.randn(2, 3, *size)
    assert UNet(spatial_dims, 3, 5, (4, 6, 8), (2, 3))(x).shape == (2, 5, *size)
    assert resnet18(7, 3, width=2, spatial_dims=spatial_dims)(x).shape == (2, 7)
    assert ConvNeXt((1, 1), (4, 8), num_classes=7, spatial_dims=spatial_dims)(x).shape == (2, 7)


def test_the_u_net_takes_any_size() -> None:
    model = UNet(2, 1, 1, (2, 3, 4), (2, 3))
    for height in range(1, 15):
        x = torch.randn(1, 1, height, 8)
        assert model(x).shape == x.shape


def test_bad_arguments_say_what_is_allowed() -> None:
    with pytest.raises(ValueError, match="one entry less than `channels`"):
        UNet(2, 1, 1, (4, 8), (2, 2))
    with pytest.raises(ValueError, match="must be of one length"):
        ConvNeXt((1, 1), (4,))
    with pytest.raises(ValueError, match=r"`spatial_dims` \(=4\) must be between 1 and 3"):
        UNet(4, 1, 1, (4, 8), (2,))
    with pytest.raises(ValueError, match="at least 0 and below 1"):
        ConvNeXt((2,), (4,), stochastic_depth=1.0)


@dataclass(frozen=True)
class Network:
    """A small network, an input, and its classes: one for each pixel where `dense`."""

    build: Callable[[], nn.Module]
    input: tuple[int, ...]
    dense: bool = False


NETWORKS = {
    "UNet 2-d": Network(lambda: UNet(2, 3, 3, (4, 6, 8), (2, 2)), (2, 3, 37, 30), dense=True),
    "UNet 3-d": Network(lambda: UNet(3, 1, 3, (4, 6), (2,), convs=1), (2, 1, 9, 12, 10), dense=True),
    "ResNet": Network(lambda: ResNet((1, 1), num_classes=3, width=4), (2, 3, 40, 36)),
    "ResNet, bottlenecks": Network(lambda: ResNet((1, 1), use_bottleneck=True, num_classes=3, width=2), (2, 3, 33, 36)),
    "ConvNeXt": Network(
        lambda: ConvNeXt((1, 1), (4, 6), num_classes=3, layer_scale=0.5, stochastic_depth=0.5), (2, 3, 40, 44)
    ),
}


def train(network: Network, mesh: DeviceMesh | None, at: tuple[Any, ...]) -> tuple[torch.Tensor, nn.Module, Sizes]:
    """Two steps of training; the last loss, the network after them, and the sizes of what was made for them."""
    torch.manual_seed(0)
    model = network.build().double().train()
    x = torch.randn(network.input, dtype=torch.float64)
    target = torch.randint(3, (network.input[0], *network.input[2:]) if network.dense else network.input[:1])
    if mesh is not None:
        model = convmesh.distribute(model, mesh)
        x = place(x, mesh, at)
        target = place(target, mesh, tuple(d if d == 0 else d - 1 if network.dense else "R" for d in at))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with Sizes() as sizes:
        for _ in range(2):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), target)
            loss.backward()
            optimizer.step()
    return loss.detach(), model, sizes


def check(mesh: DeviceMesh, case: tuple[str, tuple[Any, ...]]) -> None:
    name, at = case
    expected_loss, expected, one = train(NETWORKS[name], None, at)
    with convmesh.enable():
        loss, model, many = train(NETWORKS[name], mesh, at)
    assert isinstance(loss, DTensor)
    assert_close(loss.full_tensor(), expected_loss)
    for actual, value in zip(model.state_dict().values(), expected.state_dict().values(), strict=True):
        assert_close(actual.full_tensor(), value)
    image = torch.empty(NETWORKS[name].input, dtype=torch.float64)
    assert not is_whole(one, many, image), f"{many.largest} bytes by {many.maker}, {many.received_at_once} at once"


@pytest.mark.parametrize("name", NETWORKS)
def test_training_on_a_mesh_is_that_of_one_process(pool: Pool, name: str) -> None:
    pool.run_cases(check, [(name, (2, 3)), (name, (0, 3))], mesh=(2, 2))
