"""`make demo`: a patch embedding and a depthwise block, trained on local ranks and on one process, side by side."""

from __future__ import annotations

import multiprocessing as mp
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module

from .api import enable
from .comm import count_traffic
from .geometry import Window, shards
from .process_memory import peak_memory

STEPS = 10
IMAGE = (2, 3, 512, 1024)
CHANNELS, PATCH, KERNEL = 96, 4, 7
WIDTH = 3  # the dimension that is cut


class Block(nn.Module):
    """The beginning of a ConvNeXt: unmodified PyTorch, which knows nothing of ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(IMAGE[1], CHANNELS, PATCH, stride=PATCH)
        self.depthwise = nn.Conv2d(CHANNELS, CHANNELS, KERNEL, padding=KERNEL // 2, groups=CHANNELS)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.depthwise(self.stem(x))
        return y


@dataclass(frozen=True)
class Run:
    """What one process reports of its training. The tensors are whole, and the same on every rank."""

    output: torch.Tensor
    weights: list[torch.Tensor]
    gradients: list[torch.Tensor]
    seconds: float  # a step, the median
    memory: int
    bytes_sent: int


def train(mesh: DeviceMesh | None, report: Callable[[], None]) -> Run:
    """Ten steps of SGD from the same start on the same data, whatever the mesh."""
    torch.manual_seed(0)
    model = Block() if mesh is None else distribute_module(Block(), mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    generator = torch.Generator().manual_seed(1)
    last: list[torch.Tensor] = []
    seconds: list[float] = []

    def step() -> None:
        image = torch.rand(IMAGE, generator=generator)
        x = image if mesh is None else _own_part(image, mesh)
        del image
        began = time.perf_counter()
        optimizer.zero_grad()
        y = model(x)
        y.square().sum().mul(0.5 / y.numel()).backward()
        optimizer.step()
        seconds.append(time.perf_counter() - began)
        last[:] = [y.detach()]

    def steps() -> None:
        for _ in range(STEPS):
            step()
            report()

    with count_traffic() as traffic:
        memory = peak_memory(steps)
    parameters = list(model.parameters())
    gradients = [_whole(p.grad) for p in parameters if p.grad is not None]
    median = sorted(seconds)[STEPS // 2]
    weights = [_whole(p.detach()) for p in parameters]
    return Run(_whole(last[0]), weights, gradients, median, memory, traffic.bytes_sent // STEPS)


def _own_part(image: torch.Tensor, mesh: DeviceMesh) -> DTensor:
    part = image.chunk(mesh.size(), WIDTH)[mesh.get_local_rank()].clone()
    return DTensor.from_local(part, mesh, [Shard(WIDTH)], run_check=False, shape=image.shape, stride=image.stride())


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    if isinstance(tensor, DTensor):
        tensor = tensor.redistribute(placements=[Replicate()]).to_local()
    return tensor.detach()


def least_bytes(ranks: int) -> int:
    """The most that a rank must send in a step: what other ranks' outputs read of its part, forward and backward."""
    window, size = Window(KERNEL, padding=KERNEL // 2), IMAGE[WIDTH] // PATCH
    owned = shards(size, (ranks,))
    columns = [sum(len(mine & window.reads(other)) for other in owned if other != mine) for mine in owned]
    return 2 * max(columns) * IMAGE[0] * CHANNELS * (IMAGE[2] // PATCH) * 4


def _work(rank: int, ranks: int, store: str, pipe: Connection) -> None:
    """A rank's process; with one rank, the single process that the others are compared with."""
    torch.set_num_threads(1 if ranks > 1 else 2)
    mesh = None
    if ranks > 1:
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
        mesh = DeviceMesh("cpu", torch.arange(ranks))
    with enable():
        result = train(mesh, lambda: pipe.send(None))
    whole = result if rank == 0 else Run(torch.empty(0), [], [], result.seconds, result.memory, result.bytes_sent)
    pipe.send({name: _numbers(value) for name, value in vars(whole).items()})
    if ranks > 1:
        dist.destroy_process_group()


def _numbers(value: Any) -> Any:
    """Tensors as numpy arrays: these travel through a pipe as plain bytes."""
    if isinstance(value, list):
        return [_numbers(item) for item in value]
    return value.contiguous().view(torch.uint8).numpy().tobytes() if isinstance(value, torch.Tensor) else value


def _tensors(value: Any) -> Any:
    if isinstance(value, list):
        return [_tensors(item) for item in value]
    return torch.frombuffer(bytearray(value), dtype=torch.float32) if isinstance(value, bytes) and value else value


def launch(ranks: int, advance: Callable[[], None]) -> list[Run]:
    """Train on `ranks` processes of this machine; `advance` is called after each step of each."""
    context = mp.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        pipes = []
        for rank in range(ranks):
            pipe, far_end = context.Pipe()
            arguments = (rank, ranks, str(Path(folder) / "store"), far_end)
            context.Process(target=_work, args=arguments, daemon=True).start()
            far_end.close()
            pipes.append(pipe)
        results: dict[Any, Run] = {}
        while len(results) < ranks:
            for ready in wait([pipe for pipe in pipes if pipe not in results]):
                assert isinstance(ready, Connection)
                message = ready.recv()
                if message is None:
                    advance()
                else:
                    results[ready] = Run(**{name: _tensors(value) for name, value in message.items()})
    return [results[pipe] for pipe in pipes]


def main(ranks: int = 2) -> None:
    console = Console()
    with Progress(console=console) as progress:
        tasks = {
            count: progress.add_task(f"{count} process{'es' * (count > 1)}", total=STEPS * count)
            for count in (1, ranks)
        }
        runs = {count: launch(count, lambda task=tasks[count]: progress.advance(task)) for count in tasks}  # type: ignore[misc]
    console.print(_table(runs[1][0], runs[ranks]))


def _table(one: Run, many: list[Run]) -> Table:
    table = Table(title=f"{STEPS} steps of a patch embedding and a depthwise 7x7 block on {IMAGE}, cut along its width")
    for heading in ("", "one process", f"{len(many)} ranks", "compared"):
        table.add_column(heading, justify="right" if heading else "left")

    def difference(a: list[torch.Tensor], b: list[torch.Tensor]) -> str:
        worst = max(((x - y).abs().max() / y.abs().max()).item() for x, y in zip(a, b, strict=True))
        return f"{worst:.1e} of the greatest"

    table.add_row("output", "", "", difference([many[0].output], [one.output]))
    table.add_row("gradients", "", "", difference(many[0].gradients, one.gradients))
    table.add_row("weights", "", "", difference(many[0].weights, one.weights))
    memory = max(run.memory for run in many)
    table.add_row(
        "peak memory (MB)", f"{one.memory / 1e6:.0f}", f"{memory / 1e6:.0f} each", f"{memory / one.memory:.2f} x"
    )
    sent, least = max(run.bytes_sent for run in many), least_bytes(len(many))
    table.add_row("sent in a step (kB)", "", f"{sent / 1e3:.0f}", f"{sent / least:.2f} x the least possible")
    seconds = max(run.seconds for run in many)
    table.add_row(
        "time of a step (ms)", f"{one.seconds * 1e3:.0f}", f"{seconds * 1e3:.0f}", f"{seconds / one.seconds:.2f} x"
    )
    return table
