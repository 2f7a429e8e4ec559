"""`convmesh plan --device here` against training steps on ranks of this machine, the table of docs/plan.md."""

from __future__ import annotations

import argparse
import os
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

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

TRIES, LITTLE, WARM_UP = 3, 0.05, 2
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


class Round(NamedTuple):
    """A step of a rank: seconds, those of its process, and those in which cores were busy."""

    seconds: float
    own: float
    busy: float


def measure(mesh: DeviceMesh, work: Work, rounds: int) -> list[Round]:
    keep_memory()
    asked = work.problem()
    step, inputs = asked.step(mesh), asked.tensors(mesh)
    found = []
    for _ in range(rounds + WARM_UP):
        if mesh.size() > 1:
            dist.barrier(mesh.get_group(0))
        before = Round(time.perf_counter(), time.process_time(), busy())
        step(**inputs)
        after = Round(time.perf_counter(), time.process_time(), busy())
        found.append(Round(*(stop - start for start, stop in zip(before, after, strict=True))))
    return found[WARM_UP:]


def busy() -> float:
    """Seconds that cores were busy; what a hypervisor has taken counts."""
    user, nice, system, _, _, *more = map(int, Path("/proc/stat").read_text().splitlines()[0].split()[1:9])
    return (user + nice + system + sum(more)) / os.sysconf("SC_CLK_TCK")


def run(pool: Pool, console: Console, rounds: int, options: argparse.Namespace) -> list[dict[str, Any]]:
    keep_memory()
    pool.run(measure, Work(2), 1, mesh=(4,), names=("h",))  # all processes have begun
    here, rows = device("here"), []
    for work in filter(lambda work: options.only in work.name, map(Work, range(len(steps.NETWORKS)))):
        runs = Runs(work.problem(), here, None)
        for mesh in MESHES:
            predicted = _predict(runs, mesh)
            measured, others = _measure(pool, work, mesh, rounds)
            rows.append({"network": work.name, "mesh": mesh, "predicted": predicted, "measured": measured})
            console.print(f"{work.name} {words(mesh)} {predicted:.2f} {measured:.2f}, others had {others:.0%}")
    console.print(_table(rows))
    errors = [abs(row["predicted"] / row["measured"] - 1) for row in rows]
    console.print(f"median error {median(errors):.0%}; order of meshes wrong in {_out_of_order(rows)} pairs")
    return rows


def _predict(runs: Runs, mesh: dict[str, int]) -> float:
    with silent_world():
        return runs.row(mesh).seconds or 0.0


def _measure(pool: Pool, work: Work, mesh: dict[str, int], rounds: int) -> tuple[float, float]:
    """Seconds of the steps while which others had next to nothing of the cores, or of the one while which they had
    least; and what they had."""
    found: list[tuple[float, float]] = []
    for _ in range(TRIES):
        ranks = pool.run(measure, work, rounds, mesh=tuple(mesh.values()), names=tuple(mesh), timeout=600)
        for steps_of_all in zip(*ranks, strict=True):
            seconds = max(one.seconds for one in steps_of_all)
            foreign = max(one.busy for one in steps_of_all) - sum(one.own for one in steps_of_all)
            found.append((foreign / (seconds * (os.cpu_count() or 1)), seconds))
        alone = [one for one in found if one[0] < LITTLE]
        if len(alone) > 1:
            return median(seconds for _, seconds in alone), max(others for others, _ in alone)
    others, seconds = min(found)
    return seconds, others


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
