"""`convmesh plan --device here` against training steps on ranks of this machine, the table of docs/plan.md."""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch.distributed.device_mesh import DeviceMesh

from benchmarks import training_steps as steps
from benchmarks.measure import keep_memory
from convmesh.planner.devices import device
from convmesh.planner.dry_run import silent_world
from convmesh.planner.problem import Problem, problem, ranks_of, words
from convmesh.planner.runs import Runs
from tests.harness import Pool

T = TypeVar("T")
TRIES, LITTLE = 4, 0.04
MESHES: list[dict[str, int]] = [{"h": 1}, {"h": 2}, {"h": 2, "w": 2}, {"h": 4}]
# At which a step takes about a second on one core.
INPUTS = {
    "ConvNeXt-T": (2, 3, 256, 512), "ResNet-50": (4, 3, 256, 256), "U-Net 2-d": (1, 3, 512, 512),
    "U-Net 3-d": (1, 1, 64, 64, 64),
}  # fmt: skip


@dataclass(frozen=True)
class Work:
    """A training step of a network, as the planner makes it."""

    number: int

    @property
    def name(self) -> str:
        return steps.NETWORKS[self.number].title.split(",")[0]

    def problem(self) -> Problem:
        model = steps.NETWORKS[self.number].build()
        return problem(model, {"x": INPUTS[self.name]}, None, "adamw", "fp32")


def measure(mesh: DeviceMesh, work: Work, rounds: int) -> float:
    """Seconds of this rank's step."""
    keep_memory()
    asked = work.problem()
    step, inputs = asked.step(mesh), asked.tensors(mesh)
    seconds = []
    for number in range(rounds + 2):
        if mesh.size() > 1:
            dist.barrier(mesh.get_group(0))
        began = time.perf_counter()
        step(**inputs)
        if number > 1:
            seconds.append(time.perf_counter() - began)
    return median(seconds)


def run(pool: Pool, console: Console, rounds: int, options: argparse.Namespace) -> list[dict[str, Any]]:
    keep_memory()
    pool.run(measure, Work(2), 1, mesh=(4,), names=("h",))  # all processes have begun
    cores = Cores([os.getpid(), *(pid for pid in pool.pids if pid is not None)])
    here, rows = cores.alone(lambda: device("here")), []
    for work in filter(lambda work: options.only in work.name, map(Work, range(len(steps.NETWORKS)))):
        runs = Runs(work.problem(), here, None)
        for mesh in MESHES:
            predicted = cores.alone(partial(_predict, runs, mesh))
            measured = cores.alone(partial(_measure, pool, work, mesh, min(rounds, 3)))
            rows.append({"network": work.name, "mesh": mesh, "predicted": predicted, "measured": measured})
            console.print(f"{work.name} {words(mesh)} {predicted:.2f} {measured:.2f}, others had {cores.others:.0%}")
    console.print(_table(rows))
    errors = [abs(row["predicted"] / row["measured"] - 1) for row in rows]
    console.print(f"median error {median(errors):.0%}; order of meshes wrong in {_out_of_order(rows)} pairs")
    return rows


def _predict(runs: Runs, mesh: dict[str, int]) -> float:
    with silent_world():
        return runs.row(mesh).seconds or 0.0


def _measure(pool: Pool, work: Work, mesh: dict[str, int], rounds: int) -> float:
    return max(pool.run(measure, work, rounds, mesh=tuple(mesh.values()), names=tuple(mesh), timeout=600))


class Cores:
    """Whether others use them while the processes `pids` and their children do."""

    def __init__(self, pids: list[int]) -> None:
        self._pids = pids
        self.others = 0.0  # the share of all cores that they had

    def alone(self, work: Callable[[], T]) -> T:
        """What `work` returns, of some tries the one while which others had least; one where they had next to nothing
        ends them."""
        found: list[tuple[float, T]] = []
        while len(found) < TRIES and not any(others < LITTLE for others, _ in found):
            start, began = time.perf_counter(), self._foreign()
            result = work()
            spent = (time.perf_counter() - start) * (os.cpu_count() or 1)
            found.append(((self._foreign() - began) / spent, result))
        self.others, result = min(found, key=lambda one: one[0])
        return result

    def _foreign(self) -> float:
        """Seconds that cores were busy with something else; what a hypervisor has taken counts."""
        user, nice, system, _, _, *more = map(int, Path("/proc/stat").read_text().splitlines()[0].split()[1:9])
        told = [Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split() for pid in self._pids]
        own = sum(int(ticks) for fields in told for ticks in fields[11:15])  # and of children that have ended
        return (user + nice + system + sum(more) - own) / os.sysconf("SC_CLK_TCK")


def _out_of_order(rows: list[dict[str, Any]]) -> int:
    """Of pairs of meshes whose measured times differ by more than 15 %."""
    pairs = ((a, b) for a in rows for b in rows if a["network"] == b["network"])
    return sum(a["measured"] > 1.15 * b["measured"] and a["predicted"] < b["predicted"] for a, b in pairs)


def _table(rows: list[dict[str, Any]]) -> Table:
    table = Table("network", "mesh", "ranks", "predicted (s)", "measured (s)", "error")
    for row in rows:
        error = row["predicted"] / row["measured"] - 1
        table.add_row(
            row["network"], words(row["mesh"]), str(ranks_of(row["mesh"])), f"{row['predicted']:.2f}",
            f"{row['measured']:.2f}", f"{error:+.0%}",
        )  # fmt: skip
    return table
