"""The two trainings that this system is known by, on 2 ranks and on one process."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import distribute_module

import convmesh
from tests.cases import place
from tests.harness import Pool

STEPS = 10
OUTPUT = (7, 256, 128, 256)
LAYERS = {
    "patch embedding": (partial(nn.Conv2d, 3, 256, kernel_size=4, stride=4, padding=0), (7, 3, 512, 1024)),
    "depthwise": (partial(nn.Conv2d, 256, 256, kernel_size=7, padding=3, groups=256), (7, 256, 128, 256)),
}


def train(layer: str, mesh: DeviceMesh | None, threads: int) -> dict[str, torch.Tensor]:
    """The weights after ten steps with the same data."""
    make, input_shape = LAYERS[layer]
    torch.set_num_threads(threads)
    model = make()
    nn.init.ones_(model.weight)
    nn.init.zeros_(model.bias)
    if mesh is not None:
        model = distribute_module(model, mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
    generator = torch.Generator().manual_seed(0)
    x, gradient = torch.rand(input_shape, generator=generator), torch.rand(OUTPUT, generator=generator) * 1e-3
    if mesh is not None:
        x, gradient = place(x, mesh, (3,)), place(gradient, mesh, (3,))
    for _ in range(STEPS):
        model(x).backward(gradient)
        optimizer.step()
        optimizer.zero_grad()
    parameters = {name: p.detach() for name, p in model.named_parameters()}
    return parameters if mesh is None else {name: p.full_tensor() for name, p in parameters.items()}


def train_sharded(mesh: DeviceMesh, layer: str) -> dict[str, torch.Tensor]:
    with convmesh.enable():
        return train(layer, mesh, threads=1)


@pytest.mark.slow
@pytest.mark.long("the sizes and steps are those of the two trainings that this system is known by")
@pytest.mark.parametrize("layer", LAYERS)
def test_training_ends_with_the_weights_of_one_process(pool: Pool, layer: str) -> None:
    sharded = pool.run(train_sharded, layer, mesh=(2,), timeout=600)
    expected = train(layer, None, threads=2)
    for name, reference in expected.items():
        for rank in sharded:
            difference = (rank[name] - reference).double()
            assert difference.square().mean() <= 1e-6
            assert (difference / (reference.double().abs() + 1e-8)).square().mean() <= 1e-6
