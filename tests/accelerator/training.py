"""Training steps of the benchmarks' networks on the stand-in accelerator, small, in float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import convmesh
from convmesh.models import ConvNeXt, UNet, resnet50


class Network(NamedTuple):
    build: Callable[[], nn.Module]
    input: tuple[int, ...]
    dense: bool  # a label for each pixel, else one for the picture


NETWORKS = {
    "ConvNeXt": Network(lambda: ConvNeXt((1, 1, 1), (4, 8, 8), num_classes=3), (2, 3, 37, 40), False),
    "ResNet-50": Network(lambda: resnet50(num_classes=3, width=2), (2, 3, 45, 40), False),
    "U-Net 2-d": Network(lambda: UNet(2, 3, 3, (4, 6, 8), (2, 2)), (1, 3, 21, 22), True),
    "U-Net 3-d": Network(lambda: UNet(3, 1, 3, (3, 4), (2,)), (1, 1, 11, 10, 6), True),
}


class Training:
    """One process where there is no mesh, else that with its first two dimensions over height and width."""

    def __init__(self, network: Network, mesh: DeviceMesh | None, device: str, **options: bool):
        generator = torch.Generator().manual_seed(1)
        x = torch.randn(network.input, dtype=torch.float64, generator=generator)
        sizes = (network.input[0], *network.input[2:]) if network.dense else network.input[:1]
        target = torch.randint(3, sizes, generator=generator)
        torch.manual_seed(0)
        self.model = network.build().double().to(device)
        self.x, self.target = x.to(device), target.to(device)
        if mesh is not None:
            names = mesh.mesh_dim_names or ()
            self.model = convmesh.distribute(self.model, mesh)
            self.x = convmesh.shard(self.x, mesh, **{name: 2 + at for at, name in enumerate(names)})
            pixels = {name: 1 + at for at, name in enumerate(names)} if network.dense else {}
            self.target = convmesh.shard(self.target, mesh, **pixels)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2, **options)

    def __call__(self) -> torch.Tensor:
        self.optimizer.zero_grad()
        loss = F.cross_entropy(self.model(self.x), self.target)
        loss.backward()
        self.optimizer.step()
        return loss.detach()
