"""vmap over convolutions: stock torch.func, a Python loop, Opacus where there is one, and convmesh.

What a layer's output is multiplied by, to have a gradient, lies in memory as that output does, with either rule.

The candidates take turns, and each runs once before it is timed, as in the steps of a training; times are medians in
milliseconds. The ratio is stock / convmesh: above 1 convmesh is faster. "Least" is what `benchmarks.roofline` says that
the arithmetic of the definition takes at least on this machine, and stock / least the gain of a perfect library.

Everything is measured twice: as a process starts, where the C library gives large blocks back when they are freed and
every call gets them anew, page by page; and with memory kept, which leaves the arithmetic alone to be compared.
Opacus is there if it is installed: `pip install -e .[opacus]`.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch.func import grad, vmap

from benchmarks.mapped import Comparison, Run, comparisons, other_comparisons
from benchmarks.measure import interleave, keep_memory, timed
from benchmarks.roofline import least_of
from convmesh import batching
from convmesh.process_memory import peak_memory
from tests.harness import Pool

# Seconds that a turn takes at least: a single call of a few milliseconds is off by as much as is to be measured.
TURN = 0.05


@contextmanager
def rules(wanted: bool) -> Iterator[None]:
    """With our rules or torch's, warm: dispatch is slow at the first call after they were exchanged."""
    (batching.install if wanted else batching.uninstall)()
    vmap(grad(lambda w, x: F.conv1d(x, w).sum()))(torch.ones(2, 1, 1, 1), torch.ones(2, 1, 1, 1))
    yield
    batching.uninstall()


def candidates(comparison: Comparison) -> dict[str, tuple[Run, bool]]:
    """What to run, and whether with our rules."""
    runs = {"stock": (comparison.mapped, False), "loop": (comparison.loop, False)}
    if comparison.opacus is not None:
        runs["opacus"] = (comparison.opacus, False)
    return {**runs, "convmesh": (comparison.mapped, True)}


def measure(comparison: Comparison, rounds: int) -> dict[str, float]:
    """Median milliseconds."""
    torch.set_num_threads(comparison.threads)

    def turn(run: Run, ours: bool) -> float:
        with rules(ours):
            once = timed(run)
            return 1e3 * timed(run, repeat=max(1, round(TURN / once)))

    return interleave({name: partial(turn, *entry) for name, entry in candidates(comparison).items()}, rounds)


def memory_of(comparison: Comparison) -> dict[str, float]:
    """Megabytes of peak memory above what was held before."""
    memory = {}
    for name, (run, ours) in candidates(comparison).items():
        with rules(ours):
            run()
            memory[name] = peak_memory(run) / 1e6
    return memory


def least(comparison: Comparison) -> float:
    """Milliseconds that the mapped convolutions, and what the comparison has beside them, take at least."""
    with rules(True):
        tasks = [decision.task for decision in batching.explain(comparison.mapped)]
    return least_of(tasks, comparison.beside, comparison.threads, comparison.dtype)


def number(value: float) -> str:
    return f"{value:.2f}" if value < 10 else f"{value:.0f}"


def geometric_mean(values: list[float]) -> float:
    return math.exp(statistics.fmean(map(math.log, values)))


def run(pool: Pool, console: Console, rounds: int) -> None:
    """In this process: no rank takes part."""
    pool.kill()
    torch.manual_seed(0)
    usual, others = "the layers that a benchmark would take", "layers that the prices were not fitted on"
    report(f"{usual}, as a process starts", comparisons(), console, rounds, memory_of)
    report(f"{others}, as a process starts", other_comparisons(), console, rounds, memory_of)
    keep_memory()
    batching.forget()
    report(f"{usual}, memory kept", comparisons(), console, rounds, lambda comparison: {})
    report(f"{others}, memory kept", other_comparisons(), console, rounds, lambda comparison: {})


def report(
    title: str,
    makers: Iterator[Callable[[], Comparison]],
    console: Console,
    rounds: int,
    memory_of: Callable[[Comparison], Mapping[str, float]],
) -> None:
    names = ("stock", "loop", "opacus", "convmesh")
    table = Table("", title=f"{title}: milliseconds (peak MB), torch {torch.__version__}")
    for heading in (*names, "least", "stock / convmesh", "stock / least"):
        table.add_column(heading, justify="right")
    results = []
    for make in track(list(makers), description="vmapped convolutions", console=console):
        comparison = make()
        memory, times = memory_of(comparison), {**measure(comparison, rounds), "least": least(comparison)}
        results.append((comparison.name, times))
        cells = [
            number(times[name]) + (f" ({number(memory[name])})" if name in memory else "") if name in times else ""
            for name in (*names, "least")
        ]
        gains = [f"{times['stock'] / times[name]:.2f}" for name in ("convmesh", "least")]
        table.add_row(comparison.name, *cells, *gains)
    console.print(table)
    console.print(summary(results))


SMALL_AND_WIDE = ("256->256 8x8 k3", "512->512 4x4 k3")


def kind_of(name: str) -> str:
    return next((name[: name.index(way) + len(way)] for way in ("forward", "gradients") if way in name), name)


def summary(results: Sequence[tuple[str, Mapping[str, float]]]) -> Table:
    """How many times as fast as the others convmesh is, by kind of work; and a perfect library as stock."""
    table = Table("others / convmesh", title="geometric mean (the least of them)")
    for heading in ("cases", "stock", "loop", "opacus", "stock / least"):
        table.add_column(heading, justify="right")
    kinds = {"all": list(results)}
    if small := [result for result in results if result[0].endswith(SMALL_AND_WIDE)]:
        kinds["small images, wide layers"] = small
    for name, times in results:
        kinds.setdefault(kind_of(name), []).append((name, times))
    for kind, members in kinds.items():
        cells = []
        for other in ("stock", "loop", "opacus"):
            ratios = [times[other] / times["convmesh"] for _, times in members if other in times]
            cells.append(f"{geometric_mean(ratios):.2f} ({min(ratios):.2f})" if ratios else "")
        bound = geometric_mean([times["stock"] / times["least"] for _, times in members])
        table.add_row(kind, str(len(members)), *cells, f"{bound:.2f}")
    return table
