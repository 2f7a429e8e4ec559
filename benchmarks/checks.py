"""What it costs a training step that ranks compare their data and inputs: with the checks, and without them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from statistics import median
from time import perf_counter, process_time
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch.distributed.device_mesh import DeviceMesh

import convmesh
from benchmarks import training_steps as steps
from benchmarks.measure import keep_memory, timed
from convmesh.training import entry, region, same_data
from tests.harness import Pool

NETWORK = steps.NETWORKS[-1]
# `shard` compares all values in the first calls, and in ever fewer later ones.
MODES = ("off", "later", "first")
_inside = [0.0, 0.0]  # seconds, and those of the processor


class Rank:
    """One rank's model, and the whole volumes that it is given."""

    step: steps.Step
    data: tuple[torch.Tensor, torch.Tensor]


def prepare(mesh: DeviceMesh) -> None:
    convmesh.enable()
    keep_memory()
    torch.manual_seed(0)
    Rank.data = torch.rand(NETWORK.input), torch.randint(2, NETWORK.target)
    Rank.step = steps.Step(NETWORK, mesh)
    for _ in range(4):
        _step(mesh)


def _step(mesh: DeviceMesh) -> None:
    """As a script makes it that reads whole volumes on every rank."""
    x, target = Rank.data
    step = Rank.step
    step.optimizer.zero_grad()
    logits = step.model(convmesh.shard(x, mesh, h=2))
    F.cross_entropy(logits, convmesh.shard(target, mesh, h=1)).backward()
    step.optimizer.step()


def measure(mesh: DeviceMesh, mode: str) -> tuple[float, float, float, float]:
    """Of a step: seconds, and those of the processor; and both of what it spends in checks."""
    _inside[:] = 0.0, 0.0
    dist.barrier(mesh.get_group(0))
    with _checks(mesh, mode):
        begun = process_time()
        seconds = timed(lambda: _step(mesh))
        return seconds, process_time() - begun, *_inside


@contextmanager
def _checks(mesh: DeviceMesh, mode: str) -> Iterator[None]:
    """The look at an optimizer, which is one look-up in a dictionary, is always there."""
    kept = region.compare, entry._refuse_plain
    calls = same_data._calls.get()
    counted = calls[mesh]
    if mode == "off":
        region.compare = entry._refuse_plain = _nothing
    else:
        region.compare, entry._refuse_plain = (_watched(check) for check in kept)
        # One behind a power of two, or one of those in which all values are compared.
        calls[mesh] = 1 if mode == "first" else 2**20
    try:
        yield
    finally:
        region.compare, entry._refuse_plain = kept
        calls[mesh] = counted


def _nothing(*args: Any, **kwargs: Any) -> None:
    pass


def _watched(check: Any) -> Any:
    def run(*args: Any, **kwargs: Any) -> None:
        begun = perf_counter(), process_time()
        check(*args, **kwargs)
        _inside[0] += perf_counter() - begun[0]
        _inside[1] += process_time() - begun[1]

    return run


def run(pool: Pool, console: Console, rounds: int) -> None:
    on: dict[str, Any] = {"mesh": (2,), "names": ("h",), "timeout": 600}
    pool.run(prepare, **on)
    found: dict[str, list[tuple[float, ...]]] = {mode: [] for mode in MODES}
    for number in range(2 * rounds):
        for mode in MODES[number % 3 :] + MODES[: number % 3]:
            ranks = pool.run(measure, mode, **on)
            found[mode].append(tuple(max(figures) for figures in zip(*ranks, strict=True)))
    medians = {mode: [median(figures) for figures in zip(*rows, strict=True)] for mode, rows in found.items()}
    table = Table("checks", title=f"A training step of {NETWORK.title} on 2 ranks, by what is checked (medians)")
    for heading in (
        "step (s)",
        "/ without",
        "processor (s)",
        "/ without",
        "in checks / step",
        "processor in checks / step",
    ):
        table.add_column(heading, justify="right")
    for mode, says in zip(MODES, ("none", "of later steps", "of the first steps: all values"), strict=True):
        row, bare = medians[mode], medians["off"]
        table.add_row(
            says, f"{row[0]:.3f}", f"{row[0] / bare[0]:.4f}", f"{row[1]:.3f}", f"{row[1] / bare[1]:.4f}",
            f"{row[2] / bare[0]:.3%}", f"{row[3] / bare[1]:.3%}",
        )  # fmt: skip
    console.print(table)
