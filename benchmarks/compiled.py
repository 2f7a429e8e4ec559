"""Whole training steps under `torch.compile(fullgraph=True)`: forward pass, loss and backward pass.

Host time is that of one rank of two on torch's fake process group, one thread, on small inputs, with the step of plain
PyTorch that was compiled by the same backend as the measure. Compile time is that of the first step, without torch's
caches on disk; by aot_eager the operators of both passes are counted, too. Two real ranks then run the same step
compiled and not, and say how far their gradients are apart.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from time import perf_counter, thread_time
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import nn
from torch._dynamo.backends.debugging import aot_eager, boxed_nop
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

import convmesh
from benchmarks.host_rows import COMPILED, Network
from benchmarks.measure import interleave, timed
from tests.harness import Pool

BACKENDS = ("aot_eager", "inductor")
LIMIT = 1.5
RANKS = 2
_counted = 0  # operators of the graphs that aot_eager has made since somebody asked
ON = {"mesh": (RANKS,), "names": ("h",), "timeout": 3000.0}


def _count(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Any:
    global _counted
    _counted += sum(isinstance(node.target, torch._ops.OpOverload) for node in graph.graph.nodes)
    return boxed_nop(graph, inputs)


def counting(graph: torch.fx.GraphModule, inputs: list[torch.Tensor], **options: Any) -> Any:
    return aot_eager(graph, inputs, fw_compiler=_count, bw_compiler=_count, **options)


def take_count() -> int:
    global _counted
    counted, _counted = _counted, 0
    return counted


class Step:
    """Gradients of a network's loss, of a function that is compiled as a whole or not at all."""

    def __init__(self, network: Network, mesh: DeviceMesh | None, backend: str | None, dtype: torch.dtype):
        torch.manual_seed(0)
        model = network.build().to(dtype)
        x = torch.randn(network.shape, dtype=dtype)
        target = torch.randint(2, (network.shape[0], *network.shape[2:]) if network.dense else network.shape[:1])
        if mesh is not None:
            model = convmesh.distribute(model, mesh)
            x, target = (
                convmesh.shard(x, mesh, h=2),
                convmesh.shard(target, mesh, **({"h": 1} if network.dense else {})),
            )
        self.model, self.data = model, (x, target)

        def loss(x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
            return F.cross_entropy(model(x), target)

        self.loss: Callable[..., torch.Tensor] = loss
        if backend is not None:
            self.loss = torch.compile(loss, backend=counting if backend == "aot_eager" else backend, fullgraph=True)

    def __call__(self) -> None:
        self.model.zero_grad()
        self.loss(*self.data).backward()

    def gradients(self) -> dict[str, torch.Tensor]:
        self()
        return dict(_gradients(self.model))


def _gradients(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    for name, parameter in model.named_parameters():
        gradient = parameter.grad
        assert gradient is not None
        yield name, gradient.full_tensor() if isinstance(gradient, DTensor) else gradient


def _host_time(step: Step) -> Callable[[], float]:
    def measure() -> float:
        step()
        start = thread_time()
        for _ in range(3):
            step()
        return (thread_time() - start) / 3

    return measure


def measure_host(network: Network, backend: str, rounds: int) -> dict[str, Any]:
    """In a process of its own: the first step of each, and the host time of a later one."""
    torch.set_num_threads(1)
    dist.init_process_group("fake", rank=0, world_size=RANKS, store=FakeStore())
    mesh = init_device_mesh("cpu", (RANKS,), mesh_dim_names=("h",))
    convmesh.enable()
    steps = {
        "plain": Step(network, None, backend, torch.float32),
        "convmesh": Step(network, mesh, backend, torch.float32),
    }
    first = {}
    for name, step in steps.items():
        first |= {f"{name} compiles": timed(step), f"{name} operators": take_count()}
    return first | interleave({name: _host_time(step) for name, step in steps.items()}, rounds)


def measure_ranks(mesh: DeviceMesh, name: str, backend: str, rounds: int) -> dict[str, float]:
    """On real ranks: how far compiled gradients are from others, in float64, and seconds of both."""
    network = next(one for one in COMPILED if one.name == name)
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # inductor imports what is deprecated
    convmesh.enable()
    steps = {way: Step(network, mesh, way if way == backend else None, torch.float64) for way in ("eager", backend)}
    eager, compiled = (step.gradients() for step in steps.values())
    apart = max(
        float((one - compiled[name]).abs().max() / one.abs().max().clamp(min=1e-9)) for name, one in eager.items()
    )

    def seconds(step: Step) -> Callable[[], float]:
        def measure() -> float:
            dist.barrier(mesh.get_group(0))
            start = perf_counter()
            step()
            return perf_counter() - start

        return measure

    return {"apart": apart} | interleave({way: seconds(step) for way, step in steps.items()}, rounds)


def run(pool: Pool, console: Console, rounds: int, options: argparse.Namespace) -> None:
    table = Table("", title="training steps under torch.compile(fullgraph=True), ms; compile time in s")
    for heading in ("backend", "operators, plain", "operators", "compile, plain", "compile", "host time, plain",
                    "host time", f"ratio (at most {LIMIT})", "2 ranks, eager", "2 ranks, compiled",
                    "gradients apart"):  # fmt: skip
        table.add_column(heading, justify="right")
    for network in COMPILED:
        for backend in BACKENDS:
            if options.only not in f"{network.name} {backend}":
                continue
            command = [sys.executable, "-m", "benchmarks.compiled", network.name, backend, str(rounds)]
            environment = {**os.environ, "TORCHINDUCTOR_FORCE_DISABLE_CACHES": "1"}
            line = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env=environment).stdout
            host = json.loads(line.splitlines()[-1])
            ranks = pool.run(measure_ranks, network.name, backend, rounds, **ON)
            table.add_row(
                network.name, backend, *(f"{host[f'{who} operators'] or ''}" for who in ("plain", "convmesh")),
                *(f"{host[f'{who} compiles']:.0f}" for who in ("plain", "convmesh")),
                *(f"{host[who] * 1e3:.1f}" for who in ("plain", "convmesh")), f"{host['convmesh'] / host['plain']:.2f}",
                *(f"{max(one[way] for one in ranks) * 1e3:.0f}" for way in ("eager", backend)),
                f"{max(one['apart'] for one in ranks):.0e}",
            )  # fmt: skip
    console.print(table)


if __name__ == "__main__":
    chosen, backend, rounds = sys.argv[1:]
    print(json.dumps(measure_host(next(one for one in COMPILED if one.name == chosen), backend, int(rounds))))
