"""Whole training steps: one process with 2 threads against 2 ranks with 1 thread each, and memory up to 4 ranks."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import convmesh
from benchmarks.measure import interleave, timed
from convmesh.models import UNet, convnext_tiny, resnet50
from convmesh.process_memory import peak_memory
from tests.harness import Pool


@dataclass(frozen=True)
class Network:
    """Scaled so that a step takes a second or a few on 2 cores."""

    title: str
    build: Callable[[], nn.Module]
    input: tuple[int, ...]
    dense: bool  # a label for each pixel, else one for the picture


def convnext() -> nn.Module:
    return convnext_tiny(num_classes=10, stochastic_depth=0.0)


def resnet() -> nn.Module:
    return resnet50(num_classes=10)


def unet2d() -> nn.Module:
    return UNet(2, 3, 2, (16, 32, 64, 128), (2, 2, 2))


def unet3d() -> nn.Module:
    return UNet(3, 1, 2, (16, 32, 64), (2, 2))


NETWORKS = [
    Network("ConvNeXt-T, (1, 3, 512, 1024)", convnext, (1, 3, 512, 1024), False),
    Network("ResNet-50, (2, 3, 512, 512)", resnet, (2, 3, 512, 512), False),
    Network("U-Net 2-d, (1, 3, 1024, 1024)", unet2d, (1, 3, 1024, 1024), True),
    Network("U-Net 3-d, (1, 1, 96, 96, 96)", unet3d, (1, 1, 96, 96, 96), True),
]
MESHES: dict[int, tuple[tuple[int, ...], tuple[str, ...]]] = {2: ((2,), ("h",)), 4: ((2, 2), ("h", "w"))}
DIMS = {"h": 2, "w": 3}


class Step:
    """A model and its data, ready for training steps. The data of a rank are its region and no more."""

    def __init__(self, network: Network, mesh: DeviceMesh | None):
        torch.manual_seed(0)
        self.model = network.build()
        if mesh is not None:
            self.model = convmesh.distribute(self.model, mesh)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        target = (network.input[0], *network.input[2:]) if network.dense else (network.input[0],)
        self.x = _made(network.input, mesh, lambda shape: torch.rand(shape), 0)
        self.target = _made(target, mesh, lambda shape: torch.randint(2, shape), 1 if network.dense else None)

    def __call__(self, reduce: bool = True) -> None:
        self.optimizer.zero_grad()
        with nullcontext() if reduce else convmesh.no_sync(self.model):
            F.cross_entropy(self.model(self.x), self.target).backward()
        if reduce:
            self.optimizer.step()


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


class Rank:
    """One rank's side of the measurement; lives in the worker between the calls."""

    step: Step


def prepare(mesh: DeviceMesh, network: Network) -> tuple[int, int]:
    """(bytes that this rank sends for halos in a step, how many messages)"""
    convmesh.enable()
    Rank.step = Step(network, mesh)
    Rank.step()
    with convmesh.count_traffic() as traffic:
        Rank.step()
    return traffic.bytes_sent, traffic.exchanges


def measure(mesh: DeviceMesh, reduce: bool) -> tuple[float, float]:
    """Seconds of a step, and those of them in which this rank waited for others."""
    dist.barrier(mesh.get_group(0))
    with convmesh.count_traffic() as traffic:
        seconds = timed(lambda: Rank.step(reduce))
    return seconds, traffic.seconds_waiting


def memory(mesh: DeviceMesh, network: Network, alone: bool) -> int:
    """What a step needs beyond parameters, optimizer state and data."""
    convmesh.enable()
    step = Step(network, None if alone else mesh)
    step()
    step.optimizer.zero_grad()
    return peak_memory(step)


def run(pool: Pool, console: Console, rounds: int) -> list[dict[str, Any]]:
    rows = []
    with Progress(console=console) as progress:
        task = progress.add_task("training steps", total=len(NETWORKS))
        for network in NETWORKS:
            rows.append(_measure_network(pool, network, max(3, rounds // 2)))
            progress.advance(task)
    console.print(_table(rows))
    return rows


def _measure_network(pool: Pool, network: Network, rounds: int) -> dict[str, Any]:
    mesh, names = MESHES[2]
    row: dict[str, Any] = {"network": network.title, "waited": []}
    torch.set_num_threads(2)
    sent = pool.run(prepare, network, mesh=mesh, names=names, timeout=600)
    row["bytes"], row["exchanges"] = max(size for size, _ in sent), sent[0][1]
    alone = [Step(network, None)]
    alone[0]()

    def ranks(reduce: bool) -> float:
        results = pool.run(measure, reduce, mesh=mesh, names=names, timeout=600)
        if reduce:
            row["waited"].append(sum(waited for _, waited in results) / sum(seconds for seconds, _ in results))
        return max(seconds for seconds, _ in results)

    row["seconds"] = interleave(
        {"single": lambda: timed(alone[0]), "convmesh": lambda: ranks(True), "unreduced": lambda: ranks(False)}, rounds
    )
    alone.clear()  # its memory, before that of others is measured
    row["memory"] = {1: pool.run(memory, network, True, mesh=(1,), timeout=600)[0]}
    for count, (mesh_shape, mesh_names) in MESHES.items():
        row["memory"][count] = max(pool.run(memory, network, False, mesh=mesh_shape, names=mesh_names, timeout=600))
    return row


def _table(rows: list[dict[str, Any]]) -> Table:
    table = Table("network", title="A training step on 2 ranks x 1 thread against one process x 2 threads (medians)")
    headings = (
        "one process (s)", "convmesh / one", "without summing gradients / one", "waiting", "memory at 2 / 1",
        "memory at 4 / 1", "halos (MB a rank)", "exchanges",
    )  # fmt: skip
    for heading in headings:
        table.add_column(heading, justify="right")
    for row in rows:
        seconds, needed = row["seconds"], row["memory"]
        waited = sorted(row["waited"])[len(row["waited"]) // 2]
        table.add_row(
            row["network"], f"{seconds['single']:.2f}", f"{seconds['convmesh'] / seconds['single']:.2f}",
            f"{seconds['unreduced'] / seconds['single']:.2f}", f"{waited:.0%}",
            *(f"{needed[count] / needed[1]:.2f}" for count in (2, 4)), f"{row['bytes'] / 1e6:.2f}",
            str(row["exchanges"]),
        )  # fmt: skip
    return table
