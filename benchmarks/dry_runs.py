"""Training steps of whole networks as one rank of 4,096, on torch's fake process group, where nothing is sent.

What a step takes is then what a rank does by itself: the first one makes all plans and schedules, later ones find them.
Every rank has the same small part of the input, and is one in the middle of the mesh. The time is the processor's, of
one thread, most of it Python's.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from collections.abc import Callable
from math import prod
from time import process_time
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

import convmesh
from convmesh.models import UNet, convnext_tiny, resnet50
from tests.harness import Pool

MESHES = ((16, 16, 16), (64, 64), (8, 8, 64))
SECONDS = 300  # after which a network is given up


class Network(NamedTuple):
    build: Callable[[], nn.Module]
    local: tuple[int, ...]  # what each rank has of the input, if all its dimensions but channels are sharded
    dense: bool  # a label for each pixel, else one for the picture


NETWORKS = {
    "ConvNeXt-T": Network(lambda: convnext_tiny(num_classes=10, stochastic_depth=0.0), (1, 3, 32, 32), False),
    "ResNet-50": Network(lambda: resnet50(num_classes=10), (1, 3, 32, 32), False),
    "U-Net 2-d": Network(lambda: UNet(2, 3, 2, (16, 32, 64, 128), (2, 2, 2)), (1, 3, 16, 16), True),
    "U-Net 3-d": Network(lambda: UNet(3, 1, 2, (16, 32, 64), (2, 2)), (1, 1, 8, 8, 8), True),
}


def sharded_dims(network: Network, mesh: tuple[int, ...]) -> tuple[int, ...]:
    """Space, the last mesh dimension over the last dimension; and the batch where there is a mesh dimension more."""
    space = range(2, len(network.local))
    return tuple([0, *space][-len(mesh) :] if len(mesh) > len(space) else list(space)[-len(mesh) :])


def placed(local: torch.Tensor, mesh: DeviceMesh, dims: tuple[int | None, ...]) -> DTensor:
    sizes = list(local.shape)
    for size, dim in zip(mesh.shape, dims, strict=True):
        if dim is not None:
            sizes[dim] *= size
    placements = [Replicate() if dim is None else Shard(dim) for dim in dims]
    stride = torch.empty(sizes, device="meta").stride()
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=torch.Size(sizes), stride=stride)


def step_of(network: Network, mesh: DeviceMesh) -> Callable[[], None]:
    torch.manual_seed(0)
    model = convmesh.distribute(network.build(), mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    dims = sharded_dims(network, tuple(mesh.shape))
    x = placed(torch.randn(network.local), mesh, dims)
    sizes = (network.local[0], *network.local[2:]) if network.dense else network.local[:1]
    of_labels = tuple(0 if dim == 0 else dim - 1 if network.dense else None for dim in dims)
    labels = placed(torch.randint(2, sizes), mesh, of_labels)

    def step() -> None:
        optimizer.zero_grad()
        F.cross_entropy(model(x), labels).backward()
        optimizer.step()

    return step


def begin(shape: tuple[int, ...], rank: int | None = None) -> DeviceMesh:
    """This process as one rank of such a mesh, by default one in the middle."""
    middle = sum(size // 2 * prod(shape[at + 1 :]) for at, size in enumerate(shape))
    dist.init_process_group("fake", rank=middle if rank is None else rank, world_size=prod(shape), store=FakeStore())
    return init_device_mesh("cpu", shape, mesh_dim_names=tuple("abc"[: len(shape)]))


def measure(name: str, shape: tuple[int, ...], rounds: int) -> None:
    """Print the seconds of a first step, and of later ones."""
    torch.set_num_threads(1)
    step = step_of(NETWORKS[name], begin(shape))

    def seconds() -> float:
        began = process_time()
        step()
        return process_time() - began

    first, _, *later = (seconds() for _ in range(rounds + 2))
    print(json.dumps([first, statistics.median(later)]))


def run(pool: Pool, console: Console, rounds: int) -> None:
    table = Table("network", title="one rank of 4,096, fake process group: seconds of the first step | of a later one")
    for shape in MESHES:
        table.add_column(" x ".join(map(str, shape)), justify="right")
    for name in NETWORKS:
        cells = []
        for shape in MESHES:
            command = [sys.executable, "-m", "benchmarks.dry_runs", name, *map(str, shape), f"--rounds={rounds}"]
            result = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=True)
            first, later = json.loads(result.stdout.splitlines()[-1])
            cells.append(f"{first:.1f} | {later:.2f}")
        table.add_row(name, *cells)
    console.print(table)


if __name__ == "__main__":
    name, *sizes, rounds = sys.argv[1:]
    measure(name, tuple(map(int, sizes)), int(rounds.removeprefix("--rounds=")))
