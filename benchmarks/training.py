"""Whole training steps: one process with 2 threads against 2 ranks with 1 thread each, and memory up to 4 ranks."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from statistics import median
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from benchmarks import physicsnemo
from benchmarks import training_steps as steps
from benchmarks.measure import interleave, keep_memory, timed
from convmesh.demo.launch import ALLOCATION
from tests.harness import Pool, RankError
from tests.worker import WORLD_SIZE

MESHES: dict[int, tuple[tuple[int, ...], tuple[str, ...]]] = {2: ((2,), ("h",)), 4: ((2, 2), ("h", "w"))}


@contextmanager
def returning_memory(world: int = WORLD_SIZE) -> Iterator[Pool]:
    """Processes that give memory back as soon as they have no use for it, so that their peak is what was needed."""
    os.environ |= ALLOCATION
    try:
        with Pool(stays_enabled=True, world=world) as pool:
            yield pool
    finally:
        for name in ALLOCATION:
            del os.environ[name]


def run(pool: Pool, console: Console, rounds: int) -> list[dict[str, Any]]:
    rows = []
    with Progress(console=console) as progress, returning_memory() as other_pool:
        task = progress.add_task("training steps", total=len(steps.NETWORKS))
        for network in steps.NETWORKS:
            row = _measure_network(pool, network, max(5, rounds // 2))
            rows.append(row | {"memory": _measure_memory(other_pool, network)})
            progress.advance(task)
    console.print(_table(rows))
    for row in rows:
        if row["refusal"]:
            console.print(f"PhysicsNeMo, {row['network']}: {row['refusal']}")
    return rows


def _measure_network(pool: Pool, network: steps.Network, rounds: int) -> dict[str, Any]:
    on = {"mesh": MESHES[2][0], "names": MESHES[2][1], "timeout": 600}
    row: dict[str, Any] = {"network": network.title, "waited": [], "refusal": None}
    torch.set_num_threads(2)
    keep_memory()
    sent = pool.run(steps.prepare, network, **on)
    pool.run(steps.prepare_part, network, **on)
    row["bytes"], row["least"], row["exchanges"] = sum(size for size, *_ in sent), *sent[0][1:]
    alone = steps.Step(network, None)
    steps.warm_up(alone)

    def ranks() -> float:
        results = pool.run(steps.measure, **on)
        row["waited"].append(sum(waited for _, waited in results) / sum(seconds for seconds, _ in results))
        return max(seconds for seconds, _ in results)

    candidates = {
        "single": lambda: timed(alone),
        "convmesh": ranks,
        "part": lambda: max(pool.run(steps.measure_part, **on)),
        "summed": lambda: max(pool.run(steps.measure_gradients, True, **on)),
        "unsummed": lambda: max(pool.run(steps.measure_gradients, False, **on)),
        "data": lambda: max(pool.run(steps.measure_data, **on)),
    }
    with Pool(stays_enabled=True) as peers:  # of its own: PhysicsNeMo changes DTensor for good
        if physicsnemo.installed():
            try:
                peers.run(steps.prepare_peer, network, **on)
                candidates["PhysicsNeMo"] = lambda: max(seconds for seconds, _ in peers.run(steps.measure, **on))
            except RankError as error:
                row["refusal"] = error.traceback.strip().splitlines()[-1]
        row["seconds"] = interleave(candidates, rounds)
    return row


def _measure_memory(pool: Pool, network: steps.Network) -> dict[int, int]:
    needed = {1: pool.run(steps.memory, network, True, mesh=(1,), timeout=600)[0]}
    for count, (mesh, names) in MESHES.items():
        needed[count] = max(pool.run(steps.memory, network, False, mesh=mesh, names=names, timeout=600))
    return needed


def _table(rows: list[dict[str, Any]]) -> Table:
    table = Table("network", title="A training step on 2 ranks x 1 thread against one process x 2 threads (medians)")
    headings = (
        "one process (s)", "convmesh / one", "bare local part / one", "PhysicsNeMo / one", "waiting",
        "gradients summed / not summed", "data compared / step",
        "memory of one (MB)", "at 2 ranks / one", "at 4 ranks / one", "halos of convolutions (MB)", "/ least",
        "messages",
    )  # fmt: skip
    for heading in headings:
        table.add_column(heading, justify="right")
    for row in rows:
        seconds, needed = row["seconds"], row["memory"]
        peer = "raises" if row["refusal"] else ""
        if "PhysicsNeMo" in seconds:
            peer = f"{seconds['PhysicsNeMo'] / seconds['single']:.2f}"
        table.add_row(
            row["network"], f"{seconds['single']:.2f}", f"{seconds['convmesh'] / seconds['single']:.2f}",
            f"{seconds['part'] / seconds['single']:.2f}", peer,
            f"{median(row['waited']):.0%}", f"{seconds['summed'] / seconds['unsummed']:.2f}",
            f"{seconds['data'] / seconds['convmesh']:.2%}",
            f"{needed[1] / 1e6:.0f}", *(f"{needed[count] / needed[1]:.2f}" for count in (2, 4)),
            f"{row['bytes'] / 1e6:.2f}", f"{row['bytes'] / row['least']:.2f}", str(row["exchanges"]),
        )  # fmt: skip
    return table
