"""`convmesh plan --device here` against training steps on ranks of this machine, the table of docs/plan.md."""

from __future__ import annotations

import time
from dataclasses import dataclass
from statistics import median
from typing import Any

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
    step, inputs = asked.build(mesh), asked.tensors(mesh)
    seconds = []
    for number in range(rounds + 2):
        if mesh.size() > 1:
            dist.barrier(mesh.get_group(0))
        began = time.perf_counter()
        step(**inputs)
        if number > 1:
            seconds.append(time.perf_counter() - began)
    return median(seconds)


def run(pool: Pool, console: Console, rounds: int) -> list[dict[str, Any]]:
    keep_memory()
    here, rows = device("here"), []
    for work in map(Work, range(len(steps.NETWORKS))):
        runs = Runs(work.problem(), here, None)
        for mesh in MESHES:
            on = {"mesh": tuple(mesh.values()), "names": tuple(mesh), "timeout": 600}
            with silent_world():
                predicted = runs.row(mesh).seconds
            measured = max(pool.run(measure, work, min(rounds, 3), **on))
            rows.append({"network": work.name, "mesh": mesh, "predicted": predicted, "measured": measured})
            console.print(f"{work.name} {words(mesh)} {predicted:.2f} {measured:.2f}")
    console.print(_table(rows))
    errors = [abs(row["predicted"] / row["measured"] - 1) for row in rows]
    console.print(f"median error {median(errors):.0%}; order of meshes wrong in {_out_of_order(rows)} pairs")
    return rows


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
