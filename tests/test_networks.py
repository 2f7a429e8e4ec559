"""Networks of other people's packages, unmodified, on a mesh: a training step is that of one process."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, distribute_module

import convmesh
from tests.cases import place
from tests.compare import assert_close
from tests.gathers import Gathers
from tests.harness import Pool


def unet() -> torch.nn.Module:
    from monai.networks.nets import UNet

    made: torch.nn.Module = UNet(
        spatial_dims=3, in_channels=1, out_channels=2, channels=(4, 8, 16), strides=(2, 2), num_res_units=1
    )
    return made


def resnet() -> torch.nn.Module:
    from transformers import ResNetConfig, ResNetForImageClassification

    config = ResNetConfig(embedding_size=4, hidden_sizes=[8, 16], depths=[1, 1], layer_type="basic", num_labels=3)
    return ResNetForImageClassification(config)


def convnext() -> torch.nn.Module:
    from transformers import ConvNextConfig, ConvNextForImageClassification

    config = ConvNextConfig(hidden_sizes=[8, 16], depths=[1, 1], num_stages=2, num_labels=3, drop_path_rate=0.0)
    return ConvNextForImageClassification(config)


@dataclass(frozen=True)
class Network:
    build: Callable[[], torch.nn.Module]
    input: tuple[int, ...]
    target: tuple[int, ...]
    classes: int


NETWORKS = {
    "monai UNet": Network(unet, (2, 1, 16, 12, 12), (2, 16, 12, 12), 2),
    "transformers ResNet": Network(resnet, (2, 3, 40, 36), (2,), 3),
    "transformers ConvNeXt": Network(convnext, (2, 3, 40, 32), (2,), 3),
}

# Where the input is; the target is cut alike where it has these dimensions, without the channels.
PLACES: list[tuple[tuple[int, ...], tuple[Any, ...]]] = [((2,), (2,)), ((2, 2), (0, 3)), ((2, 2), (2, 3))]


def train(network: Network, mesh: DeviceMesh | None, at: tuple[Any, ...]) -> tuple[torch.Tensor, torch.nn.Module]:
    """One step of training; the loss, and the network after it."""
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what the packages say when they are imported is not our concern
        model = network.build().double().train()
    x = torch.randn(network.input, dtype=torch.float64)
    target = torch.randint(network.classes, network.target)
    if mesh is not None:
        model = distribute_module(model, mesh)
        spatial = len(network.target) > 1
        x = place(x, mesh, at)
        target = place(target, mesh, tuple(dim if dim == 0 else dim - 1 if spatial else "R" for dim in at))
    # The gradient of a bias before a norm is nothing but rounding, of which Adam with a small eps makes whole steps.
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, eps=1e-3)
    y = model(x)
    loss = F.cross_entropy(y if isinstance(y, torch.Tensor) else y.logits, target)
    loss.backward()
    optimizer.step()
    return loss.detach(), model


def check(mesh: DeviceMesh, name: str, at: tuple[Any, ...]) -> None:
    expected_loss, expected = train(NETWORKS[name], None, at)
    with convmesh.enable(), Gathers() as gathers:
        loss, model = train(NETWORKS[name], mesh, at)
    assert_close(loss.full_tensor(), expected_loss)
    for (key, actual), value in zip(model.state_dict().items(), expected.state_dict().values(), strict=True):
        try:
            assert_close(actual.full_tensor() if isinstance(actual, DTensor) else actual, value)
        except AssertionError as error:
            raise AssertionError(f"{key}: {error}") from None
    assert gathers.count == 0, f"{gathers.count} all-gathers, of up to {gathers.largest} elements"


@pytest.mark.parametrize(("mesh", "at"), PLACES)
@pytest.mark.parametrize("name", NETWORKS)
def test_a_step_of_training(pool: Pool, name: str, mesh: tuple[int, ...], at: tuple[Any, ...]) -> None:
    pool.run(check, name, at, mesh=mesh)
