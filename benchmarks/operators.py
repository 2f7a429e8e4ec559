"""One operator of every family: one process with 2 threads, 2 ranks with 1 thread each, and the ranks' bare local part.

The bare local part is the same operator on a rank's own shard, without any exchange. It does the same work: a slice of
a cut dimension is a new tensor, because its parts lie on other ranks than before, so the local part copies it too,
where a slice of one device's tensor is a view. The bare exchange is what convmesh sends, by torch's own collectives and
gloo, as somebody would write it by hand. It is replayed after the local part of forward and after that of backward,
where it happens: cores and caches are busy then, ranks are not there at the same time, and it takes longer than among
ranks that do nothing else. All are timed in runs of some calls. No operator should take longer than 1.15 local parts
and its exchange. A result that torch's DTensor leaves as a pending sum is added up, as it has to be before it is used.
"""

from __future__ import annotations

from collections.abc import Callable
from math import ceil

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

from benchmarks.measure import interleave, keep_memory, timed
from benchmarks.operator_ranks import measure, prepare
from benchmarks.operator_rows import OPERATORS, STEPS, shapes_of, tensors, work
from tests.harness import Pool

LIMIT = 1.15
# A run takes at least so many seconds and calls: a rank that the system holds up for a moment is not all that it shows.
LEAST_SECONDS, LEAST_CALLS = 0.03, 5


def run(pool: Pool, console: Console, rounds: int) -> None:
    torch.set_num_threads(2)
    keep_memory()
    table = Table("operator", title="2 ranks x 1 thread, each cut in two (medians; forward / forward + backward)")
    for heading in (
        "one process (ms)", "convmesh / one", "convmesh / local part", "exchange (ms)",
        f"convmesh / ({LIMIT} local + exchange)", "convmesh / stock",
    ):  # fmt: skip
        table.add_column(heading, justify="right")
    for name in track([*OPERATORS, *STEPS], description="operators", console=console):
        ways = (True,) if name in STEPS else (False, True)
        table.add_row(name, *_cells([_measure(pool, name, backward, rounds) for backward in ways]))
    console.print(table)


def _measure(pool: Pool, name: str, backward: bool, rounds: int) -> dict[str, float]:
    prepared = pool.run(prepare, name, backward, mesh=(2,), timeout=600)
    stock, sends = (all(said) for said in zip(*prepared, strict=True))
    single = work(name, tensors(shapes_of(name)), backward)
    single()
    calls = max(LEAST_CALLS, ceil(LEAST_SECONDS / timed(single)))

    def ranks(what: str) -> Callable[[], float]:
        return lambda: max(pool.run(measure, what, calls, mesh=(2,), timeout=600))

    def alone() -> float:
        single()
        return timed(single, calls)

    candidates: dict[str, Callable[[], float]] = {"single": alone}
    named = ("convmesh", "local", *(["local and exchange"] if sends else []), *(["stock"] if stock else []))
    result = interleave(candidates | {what: ranks(what) for what in named}, rounds)
    return result | {"exchange": max(0.0, result["local and exchange"] - result["local"]) if sends else 0.0}


def _cells(results: list[dict[str, float]]) -> list[str]:
    def ratio(of: Callable[[dict[str, float]], float | None]) -> str:
        return " / ".join("" if value is None else f"{value:.2f}" for value in map(of, results))

    return [
        ratio(lambda r: r["single"] * 1e3),
        ratio(lambda r: r["convmesh"] / r["single"]),
        ratio(lambda r: r["convmesh"] / r["local"]),
        ratio(lambda r: r["exchange"] * 1e3),
        ratio(lambda r: r["convmesh"] / (LIMIT * r["local"] + r["exchange"])),
        ratio(lambda r: r["convmesh"] / r["stock"] if "stock" in r else None),
    ]
