"""One convolution: one process with 2 threads, 2 ranks with 1 thread each, and the ranks' bare local part."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import convmesh
from benchmarks.measure import interleave, timed
from convmesh.process_memory import peak_memory
from tests.harness import Pool


@dataclass(frozen=True)
class Layer:
    """A convolution of an input that is cut along its last dimension."""

    title: str
    input: tuple[int, ...]
    weight: tuple[int, ...]
    stride: int = 1
    padding: int = 0
    groups: int = 1
    repeat: int = 1
    dim: int = 3

    def forward(self, x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return F.conv2d(x, w, b, self.stride, self.padding, 1, self.groups)


LAYERS = [
    Layer("(a) 3->256 k4 s4, (7, 3, 512, 1024)", (7, 3, 512, 1024), (256, 3, 4, 4), stride=4),
    Layer("(b) depthwise 256 k7, (7, 256, 128, 256)", (7, 256, 128, 256), (256, 1, 7, 7), padding=3, groups=256),
    Layer("(c) 64->64 k3, (2, 64, 256, 512)", (2, 64, 256, 512), (64, 64, 3, 3), padding=1),
    Layer("tiny 8->8 k3, (1, 8, 16, 16)", (1, 8, 16, 16), (8, 8, 3, 3), padding=1, repeat=50),
    Layer("tiny 8->8 k3, batch-sharded (2, 8, 16, 16)", (2, 8, 16, 16), (8, 8, 3, 3), padding=1, repeat=50, dim=0),
]


def make(layer: Layer) -> list[torch.Tensor]:
    return [torch.rand(layer.input), torch.rand(layer.weight), torch.rand(layer.weight[0])]


def step(layer: Layer, tensors: list[torch.Tensor], backward: bool) -> Callable[[], object]:
    leaves = [t.detach().requires_grad_(backward) for t in tensors]
    gradient = torch.ones_like(layer.forward(*(t.detach() for t in tensors))) if backward else None

    def run() -> None:
        y = layer.forward(*leaves)
        if backward:
            torch.autograd.grad(y, leaves, gradient)

    return run


class Rank:
    """One rank's side of the measurement; lives in the worker between the calls."""

    work: dict[tuple[str, bool], Callable[[], object]]


def prepare(mesh: DeviceMesh, layer: Layer) -> int:
    convmesh.enable()
    placed = _place(mesh, layer)
    Rank.work = {}
    for backward in (False, True):
        Rank.work["sharded", backward] = step(layer, placed, backward)
        Rank.work["local", backward] = step(layer, [t.to_local() for t in placed], backward)
    with convmesh.count_traffic() as traffic:
        Rank.work["sharded", True]()
    Rank.work["local", True]()
    return traffic.bytes_sent


def _place(mesh: DeviceMesh, layer: Layer) -> list[DTensor]:
    x, w, b = make(layer)
    cut = distribute_tensor(x, mesh, [Shard(layer.dim)], src_data_rank=None)
    return [cut, *(distribute_tensor(t, mesh, [Replicate()], src_data_rank=None) for t in (w, b))]


def measure(mesh: DeviceMesh, what: str, backward: bool, repeat: int) -> float:
    """Seconds from the moment all ranks begin until this one is done."""
    if what == "stock":
        convmesh.disable()
    dist.barrier(mesh.get_group())
    seconds = timed(Rank.work["local" if what == "local" else "sharded", backward], repeat)
    convmesh.enable()
    return seconds


def memory(mesh: DeviceMesh, layer: Layer) -> int:
    """With the rank's own data and no more: as a loader that reads regions would have it."""
    shape = list(layer.input)
    shape[layer.dim] //= mesh.size()
    convmesh.enable()

    def run() -> None:
        x = DTensor.from_local(torch.rand(shape), mesh, [Shard(layer.dim)], run_check=False)
        w, b = (distribute_tensor(t, mesh, [Replicate()], src_data_rank=None) for t in make_weights(layer))
        step(layer, [x, w, b], True)()

    return peak_memory(run)


def make_weights(layer: Layer) -> list[torch.Tensor]:
    return [torch.rand(layer.weight), torch.rand(layer.weight[0])]


def least_bytes(layer: Layer) -> int:
    """Forward: every column that an output on the other rank reads. Backward: the same of the output's gradient."""
    if layer.dim == 0:
        return 0
    kernel, n = layer.weight[-1], layer.input[0]
    halo = max(0, kernel - layer.stride) - layer.padding if layer.padding else max(0, kernel - layer.stride)
    rows = layer.input[2]
    return (layer.input[1] + layer.weight[0]) * n * rows * halo * 4


def run(pool: Pool, console: Console, rounds: int) -> list[dict[str, Any]]:
    rows = []
    with Progress(console=console) as progress:
        task = progress.add_task("convolutions", total=len(LAYERS))
        for layer in LAYERS:
            rows.append(_measure_layer(pool, layer, rounds))
            progress.advance(task)
    console.print(_table(rows))
    return rows


def _measure_layer(pool: Pool, layer: Layer, rounds: int) -> dict[str, Any]:
    torch.set_num_threads(2)
    sent = pool.run(prepare, layer, mesh=(2,), timeout=600)
    row: dict[str, Any] = {"layer": layer.title, "bytes": max(sent), "least": least_bytes(layer)}
    for backward in (False, True):
        single = step(layer, make(layer), backward)
        single()

        def ranks(what: str, backward: bool = backward) -> float:
            return max(pool.run(measure, what, backward, layer.repeat, mesh=(2,), timeout=600))

        candidates: dict[str, Callable[[], float]] = {
            "single": lambda single=single: timed(single, layer.repeat),  # type: ignore[misc]
            "convmesh": lambda: ranks("sharded"),
            "local": lambda: ranks("local"),
        }
        if layer.dim == 0:
            candidates["stock"] = lambda: ranks("stock")
        row["both" if backward else "forward"] = interleave(candidates, rounds)
        del single, candidates
    row["memory"] = max(pool.run(memory, layer, mesh=(2,), timeout=600))
    row["memory of one"] = peak_memory(lambda: step(layer, make(layer), True)())
    return row


def _table(rows: list[dict[str, Any]]) -> Table:
    title = "2 ranks x 1 thread against one process x 2 threads (medians; forward / forward + backward)"
    table = Table("layer", title=title)
    for heading in (
        "one process (ms)", "convmesh / one", "convmesh / local part", "convmesh / stock", "memory / one",
        "bytes sent", "least",
    ):  # fmt: skip
        table.add_column(heading, justify="right")
    for row in rows:
        forward, both = row["forward"], row["both"]
        ratios = [
            f"{forward['convmesh'] / forward[other]:.2f} / {both['convmesh'] / both[other]:.2f}"
            if other in both
            else ""
            for other in ("single", "local", "stock")
        ]
        table.add_row(
            row["layer"], f"{forward['single'] * 1e3:.2f} / {both['single'] * 1e3:.2f}", *ratios,
            f"{row['memory'] / max(1, row['memory of one']):.2f}", f"{row['bytes']:,}", f"{row['least']:,}",
        )  # fmt: skip
    return table
