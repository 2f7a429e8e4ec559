"""What one rank of a large mesh does on its own, before and after communication: on torch's fake process group.

The local tensor stays the same while the mesh grows, so that only what grows with the ranks makes a difference: the
first call of a shape, which makes plans and schedules, and each later one. The rank is one in the middle of the mesh.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from math import prod

import torch
import torch.distributed as dist
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch.distributed.tensor import DTensor, Replicate, Shard, init_device_mesh
from torch.distributed.tensor.placement_types import Placement
from torch.testing._internal.distributed.fake_pg import FakeStore

import convmesh
from benchmarks.measure import timed
from tests.harness import Pool

# By the shape of the mesh, the tensor dimensions that its dimensions shard.
MESHES: dict[tuple[int, ...], tuple[int, ...]] = {
    (8,): (2,), (64,): (2,), (512,): (2,), (16, 32): (2, 2), (64, 64): (2, 3), (16, 16, 16): (1, 2, 3),
}  # fmt: skip
LOCAL = (4, 4, 8)  # of one sample, on each rank
CALLS = 30
SECONDS = 60  # after which a mesh is given up

Work = Callable[[DTensor], object]


def _operators(mesh: dist.device_mesh.DeviceMesh) -> dict[str, Work]:
    whole = [Replicate()] * mesh.ndim
    weight = DTensor.from_local(torch.randn(4, 4, 3, 3), mesh, whole, run_check=False)
    chosen = torch.tensor([3, 0, 2, 3])

    def over_channels(x: DTensor) -> DTensor:
        return weight if x.shape[1] == 4 else _wide(mesh, x.shape[1])

    group = mesh.get_group(mesh.ndim - 1)
    lists = [0] * group.size()
    lists[group.rank()] = 64
    message = torch.randn(64)
    bare = torch.ops._c10d_functional.all_to_all_single
    return {
        "one all_to_all_single": lambda x: bare(message, lists, lists, group.group_name),
        "convolution": lambda x: F.conv2d(x, over_channels(x), padding=1),
        "max pool 3 s2": lambda x: F.max_pool2d(x, 3, 2, 1),
        "interpolate": lambda x: F.interpolate(x, scale_factor=2, mode="bilinear"),
        "slice": lambda x: x[:, :, 3:-2],
        "roll": lambda x: x.roll(5, 2),
        "flatten": lambda x: x.flatten(1),
        "gather": lambda x: x.gather(2, _places(x)),
        "index_select": lambda x: x.index_select(2, chosen),
    }


def _wide(mesh: dist.device_mesh.DeviceMesh, channels: int) -> DTensor:
    return DTensor.from_local(torch.randn(4, channels, 3, 3), mesh, [Replicate()] * mesh.ndim, run_check=False)


def _places(x: DTensor) -> DTensor:
    """For every number one that lies two ranks further along the same dimension."""
    local = x.to_local()
    index = torch.full(local.shape, x.shape[2] // 2, dtype=torch.int64)
    return DTensor.from_local(index, x.device_mesh, x.placements, run_check=False, shape=x.shape, stride=x.stride())


def _tensor(mesh: dist.device_mesh.DeviceMesh, dims: tuple[int, ...], batch: int) -> DTensor:
    sizes = [batch, *LOCAL]
    for size, dim in zip(mesh.shape, dims, strict=True):
        sizes[dim] *= size
    placements: list[Placement] = [Shard(dim) for dim in dims]
    stride = torch.empty(sizes, device="meta").stride()
    local = torch.randn(batch, *LOCAL)
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=torch.Size(sizes), stride=stride)


def measure(shape: tuple[int, ...], rounds: int) -> None:
    """Print the milliseconds of every operator: of its first call, and of each later one."""
    torch.set_num_threads(1)
    ranks = prod(shape)
    middle = sum(size // 2 * prod(shape[at + 1 :]) for at, size in enumerate(shape))
    dist.init_process_group("fake", rank=middle, world_size=ranks, store=FakeStore())
    mesh = init_device_mesh("cpu", shape)
    convmesh.enable()
    operators = _operators(mesh)
    for name, work in operators.items():
        first: list[float] = []
        later: list[float] = []
        for batch in range(2, 3 + rounds):  # every batch size has plans of its own
            x = _tensor(mesh, MESHES[shape], batch)
            call = partial(work, x)
            first.append(timed(call))
            later += [timed(call) for _ in range(CALLS)]
        # The very first call of all imports and initialises.
        print(json.dumps([name, statistics.median(first[1:]) * 1e3, statistics.median(later) * 1e3]), flush=True)


def run(pool: Pool, console: Console, rounds: int) -> None:
    table = Table("operator", title="one rank of a fake process group: ms of the first call | of each call")
    found: dict[str, list[str]] = {}
    for number, shape in enumerate(MESHES):
        table.add_column(" x ".join(map(str, shape)), justify="right")
        command = [sys.executable, "-m", "benchmarks.large_meshes", *map(str, shape), f"--rounds={rounds}"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            try:
                lines, _ = process.communicate(timeout=SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                lines, _ = process.communicate()
        for name, first, later in map(json.loads, lines.splitlines()):
            found.setdefault(name, [""] * len(MESHES))[number] = f"{first:.1f} | {later:.2f}"
    for name, cells in found.items():
        table.add_row(name, *cells)
    console.print(table)


if __name__ == "__main__":
    *sizes, rounds = sys.argv[1:]
    measure(tuple(map(int, sizes)), int(rounds.removeprefix("--rounds=")))
