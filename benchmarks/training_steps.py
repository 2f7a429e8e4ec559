"""The networks whose training steps are measured, and what a rank does for that."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Shard

import convmesh
from benchmarks import physicsnemo
from benchmarks.measure import keep_memory, timed
from convmesh.demo.traffic import watch_step
from convmesh.models import UNet, convnext_tiny, resnet50
from convmesh.process_memory import peak_memory


@dataclass(frozen=True)
class Network:
    """Of a size at which a step takes a few seconds on 2 cores."""

    title: str
    build: Callable[[], nn.Module]
    input: tuple[int, ...]
    dense: bool  # a label for each pixel, else one for the picture

    @property
    def target(self) -> tuple[int, ...]:
        return (self.input[0], *self.input[2:]) if self.dense else self.input[:1]


def convnext() -> nn.Module:
    return convnext_tiny(num_classes=10, stochastic_depth=0.0)


def resnet() -> nn.Module:
    return resnet50(num_classes=10)


def unet2d() -> nn.Module:
    return UNet(2, 3, 2, (16, 32, 64, 128), (2, 2, 2))


def unet3d() -> nn.Module:
    return UNet(3, 1, 2, (16, 32, 64), (2, 2))


NETWORKS = [
    Network("ConvNeXt-T, (2, 3, 512, 1024)", convnext, (2, 3, 512, 1024), False),
    Network("ResNet-50, (4, 3, 512, 512)", resnet, (4, 3, 512, 512), False),
    Network("U-Net 2-d, (1, 3, 1024, 1024)", unet2d, (1, 3, 1024, 1024), True),
    Network("U-Net 3-d, (1, 1, 96, 96, 96)", unet3d, (1, 1, 96, 96, 96), True),
]
DIMS = {"h": 2, "w": 3}


class Step:
    """A model and its data, ready for training steps. The data of a rank are its region and no more."""

    def __init__(self, network: Network, mesh: DeviceMesh | None):
        torch.manual_seed(0)
        self.model = network.build()
        if mesh is not None:
            self.model = convmesh.distribute(self.model, mesh)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)
        self.x = _made(network.input, mesh, torch.rand, 0)
        self.target = _made(network.target, mesh, partial(torch.randint, 2), 1 if network.dense else None)

    def __call__(self) -> None:
        self.gradients()
        self.optimizer.step()

    def gradients(self, summed: bool = True) -> None:
        self.optimizer.zero_grad()
        with nullcontext() if summed else convmesh.no_sync(self.model):
            self.loss().backward()

    def loss(self) -> torch.Tensor:
        return F.cross_entropy(self.model(self.x), self.target)


def _made(
    shape: tuple[int, ...],
    mesh: DeviceMesh | None,
    make: Callable[[tuple[int, ...]], torch.Tensor],
    missing: int | None,
) -> torch.Tensor:
    """Numbers of this shape; `missing` dimensions before the spatial ones, None where it has no spatial ones."""
    if mesh is None:
        return make(shape)
    names = mesh.mesh_dim_names or ()
    dims = {} if missing is None else {name: DIMS[name] - missing for name in names}
    region = convmesh.region(shape, mesh, **dims)
    return convmesh.from_region(make(tuple(part.stop - part.start for part in region)), shape, mesh, **dims)


def warm_up(step: Step) -> None:
    """Until an allocator has all the memory that it needs for this order of requests, which takes some steps."""
    for _ in range(4):
        step()


class Rank:
    """One rank's side of the measurement; lives in the worker between the calls."""

    step: Callable[[], None]
    part: Callable[[], None]


def prepare(mesh: DeviceMesh, network: Network) -> tuple[int, int, int]:
    """(bytes of halos that this rank sends for the convolutions of a step, the least for all ranks, messages)"""
    convmesh.enable()
    keep_memory()
    Rank.step = step = Step(network, mesh)
    warm_up(step)
    with convmesh.count_traffic() as traffic:
        layers = watch_step(step.model, step.loss, (mesh.size(), 1))
    convolutions = [(layer.halo, layer.sides.least_bytes(4)) for layer in layers if layer.sides is not None]
    return sum(sent for sent, _ in convolutions), sum(least for _, least in convolutions), traffic.exchanges


def measure(mesh: DeviceMesh) -> tuple[float, float]:
    """Seconds of a step, and those of them in which this rank waited for others."""
    dist.barrier(mesh.get_group(0))
    with convmesh.count_traffic() as traffic:
        seconds = timed(Rank.step)
    return seconds, traffic.seconds_waiting


def measure_gradients(mesh: DeviceMesh, summed: bool) -> float:
    """Seconds until the gradients are there, with and without their sum over the ranks."""
    assert isinstance(Rank.step, Step)
    dist.barrier(mesh.get_group(0))
    return timed(lambda: Rank.step.gradients(summed))  # type: ignore[attr-defined]


def measure_data(mesh: DeviceMesh) -> float:
    """Seconds in which the data of a step are made of the ranks' regions, nearly all of them for comparing ranks."""
    assert isinstance(Rank.step, Step)
    data = [(t.to_local(), t.shape, t.placements) for t in (Rank.step.x, Rank.step.target) if isinstance(t, DTensor)]
    names = mesh.mesh_dim_names or ()

    def make() -> None:
        for local, shape, placements in data:
            dims = {name: p.dim for name, p in zip(names, placements, strict=True) if isinstance(p, Shard)}
            convmesh.from_region(local, shape, mesh, **dims)

    dist.barrier(mesh.get_group(0))
    return timed(make, 20)


def prepare_part(mesh: DeviceMesh, network: Network) -> None:
    """The bare local part: every rank trains a network of its own on as much as it would own of the whole."""
    keep_memory()
    samples, channels, height, *others = network.input
    Rank.part = step = Step(replace(network, input=(samples, channels, height // mesh.size(), *others)), None)
    warm_up(step)


def measure_part(mesh: DeviceMesh) -> float:
    dist.barrier(mesh.get_group(0))
    return timed(Rank.part)


def prepare_peer(mesh: DeviceMesh, network: Network) -> None:
    keep_memory()
    Rank.step = physicsnemo.make_step(network.build, torch.rand(network.input), torch.randint(2, network.target), mesh)


def memory(mesh: DeviceMesh, network: Network, alone: bool) -> int:
    """What a step needs beyond parameters, optimizer state and data."""
    convmesh.enable()
    step = Step(network, None if alone else mesh)
    step()
    step.optimizer.zero_grad()
    return peak_memory(step)
