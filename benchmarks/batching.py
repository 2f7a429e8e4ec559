"""vmap over convolutions: stock torch.func, a Python loop, Opacus where there is one, and convmesh.

Each has a process of its own, and they take turns: none changes the other's memory. A turn is of 50 ms at least, after
calls that are not timed, as in the steps of a training, and is taken again where others had the cores meanwhile; times
are medians in milliseconds, with a `!` where no such turn was found. The ratio is stock / convmesh: above 1 convmesh is
faster. "Least" is what `benchmarks.roofline` says that the arithmetic of the definition
takes at least on this machine, and stock / least the gain of a perfect library.

What a layer's output is multiplied by, to have a gradient, lies in memory as that output does, with either rule.

As a process starts the C library gives large blocks back when they are freed, and every call gets them anew, page by
page; `--memory-kept` leaves the arithmetic alone to be compared. `--only` takes the rows that have a text in their
name, `--share 2/3` every third of them from the second on. With ATEN_CPU_CAPABILITY=avx2 and ONEDNN_MAX_CPU_ISA=AVX2 in
the environment neither torch nor convmesh uses wider vectors. Opacus is there if it is installed: `pip install -e
.[opacus]`.
"""

from __future__ import annotations

import argparse
import math
import statistics
from collections.abc import Mapping, Sequence
from functools import partial

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

from benchmarks.mapped import LISTS, Comparison, Run
from benchmarks.measure import LOST, Turn, give_memory_back, interleave, keep_memory, undisturbed
from benchmarks.roofline import least_of
from benchmarks.turns import Contenders
from convmesh import batching
from convmesh.process_memory import peak_memory
from tests.harness import Pool

NAMES = ("stock", "loop", "opacus", "convmesh")
SMALL_AND_WIDE = ("256->256 8x8 k3", "512->512 4x4 k3")


class Way:
    """One of `NAMES`, in a process of its own."""

    def __init__(self, name: str, threads: int, memory_kept: bool) -> None:
        torch.manual_seed(0)
        self.name, self.threads = name, threads
        if memory_kept:
            keep_memory()
        if name == "convmesh":
            batching.install()
        self.comparison: Comparison | None = None

    def prepare(self, group: str, number: int) -> str:
        """One at a time, since some hold a lot of memory."""
        self.comparison = None
        torch.set_num_threads(self.threads)
        name, make = LISTS[group][number]
        self.comparison = make()
        if self.comparison.threads is not None:
            torch.set_num_threads(self.comparison.threads)
        return name

    @property
    def run(self) -> Run | None:
        """None where there is no such way."""
        assert self.comparison is not None
        return {"loop": self.comparison.loop, "opacus": self.comparison.opacus}.get(self.name, self.comparison.mapped)

    def turn(self) -> Turn | None:
        return None if self.run is None else undisturbed(self.run)

    def memory(self) -> float:
        """Megabytes of peak memory above what is held when everything has been given back."""
        give_memory_back()
        return 0.0 if self.run is None else peak_memory(self.run) / 1e6

    def least(self) -> float:
        """Milliseconds that the mapped convolutions, and what the comparison has beside them, take at least."""
        comparison = self.comparison
        assert comparison is not None
        tasks = [decision.task for decision in batching.explain(comparison.mapped)]
        return least_of(tasks, comparison.beside, torch.get_num_threads(), comparison.dtype)


def add_options(parser: argparse.ArgumentParser) -> None:
    options = parser.add_argument_group("attention, batching, compiled, plan, privacy, vae")
    options.add_argument("--only", default="", help="rows that have this in their name")
    options.add_argument("--share", default="1/1", help="2/3: every third of the rows, from the second on")
    options.add_argument("--threads", type=int, default=2, help="of each process, where a row does not say")
    options.add_argument("--memory-kept", action="store_true", help="memory that was used before is never given back")
    options.add_argument("--ways", default=",".join(NAMES), help=f"any of {', '.join(NAMES)}")


def run(pool: Pool, console: Console, rounds: int, options: argparse.Namespace) -> None:
    """No rank takes part."""
    pool.kill()
    wanted = options.ways.split(",")
    with Contenders({name: (Way, name, options.threads, options.memory_kept) for name in wanted}) as ways:
        for group in LISTS:
            report(group, ways, console, options)


def report(group: str, ways: Contenders, console: Console, options: argparse.Namespace) -> None:
    table = Table("", title=f"{group}: milliseconds (peak MB), torch {torch.__version__}, {options.threads} threads")
    for heading in (*ways.all, "least", "stock / convmesh", "stock / least"):
        table.add_column(heading, justify="right")
    part, parts = map(int, options.share.split("/"))
    numbers = [i for i, (name, _) in enumerate(LISTS[group]) if options.only in name][part - 1 :: parts]
    results = []
    for number in track(numbers, description="vmapped convolutions", console=console):
        (name, *_) = ways.ask_all("prepare", group, number).values()
        times, disturbed = turns(ways, options.rounds)
        if "convmesh" in ways.all:
            times["least"] = ways.all["convmesh"].ask("least")
        memory = {way: ways.all[way].ask("memory") for way in times if way != "least"}
        results.append((name, times))
        cells = [_cell(times.get(way), memory.get(way)) + "!" * (way in disturbed) for way in (*ways.all, "least")]
        gains = [f"{times['stock'] / times[way]:.2f}" if {"stock", way} <= times.keys() else "" for way in GAINS]
        table.add_row(name, *cells, *gains)
    if results:
        console.print(table, summary(results))


GAINS = ("convmesh", "least")


def turns(ways: Contenders, rounds: int) -> tuple[dict[str, float], set[str]]:
    """Median milliseconds of those that there are; and which of them others disturbed all the same."""
    taken: dict[str, list[Turn]] = {name: [] for name, way in ways.all.items() if way.ask("turn") is not None}

    def turn(name: str) -> float:
        taken[name].append(ways.all[name].ask("turn"))
        return 1e3 * taken[name][-1].seconds

    times = interleave({name: partial(turn, name) for name in taken}, rounds)
    return times, {name for name, some in taken.items() if statistics.median(each.lost for each in some) > LOST}


def _cell(time: float | None, memory: float | None) -> str:
    if time is None:
        return ""
    return _number(time) + ("" if memory is None else f" ({_number(memory)})")


def _number(value: float) -> str:
    return f"{value:.2f}" if value < 10 else f"{value:.0f}"


def geometric_mean(values: list[float]) -> float:
    return math.exp(statistics.fmean(map(math.log, values)))


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
        cells = [_ratios(members, other, "convmesh") for other in ("stock", "loop", "opacus")]
        table.add_row(kind, str(len(members)), *cells, _ratios(members, "stock", "least"))
    return table


def _ratios(members: Sequence[tuple[str, Mapping[str, float]]], above: str, below: str) -> str:
    ratios = [times[above] / times[below] for _, times in members if {above, below} <= times.keys()]
    return f"{geometric_mean(ratios):.2f} ({min(ratios):.2f})" if ratios else ""
