"""The command: trains, shows progress, writes the page and prints where it is."""

from __future__ import annotations

import argparse
import os
import time
from dataclasses import fields

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from ..report.words import size
from .launch import join, joins_torchrun, spawn
from .machine import command
from .page import page
from .picture import load
from .report import Report, Runs
from .settings import DemoError, Settings, Shape, mesh_name


def run(options: argparse.Namespace) -> int:
    """Return the exit code: 0, or 1 with the reason printed."""
    console = Console()
    settings = Settings(**{f.name: getattr(options, f.name) for f in fields(Settings) if hasattr(options, f.name)})
    began = time.perf_counter()
    try:
        load(settings)  # fails before any process starts if there is no picture
        runs = _joined(settings, options, console) if joins_torchrun() else _spawned(settings, options, console)
    except DemoError as error:
        console.print(f"[bold red]The demo failed.[/] {escape(str(error))}", highlight=False, soft_wrap=True)
        return 1
    if runs is None:  # under torchrun only the first rank writes the page
        return 0
    report = Report(settings, runs, command(), time.perf_counter() - began)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(page(report), encoding="utf-8")
    console.print(summary(report))
    where = escape(str(options.out)), escape(options.out.resolve().as_uri())
    console.print("\nThe page is [bold]{}[/]: open {}".format(*where), soft_wrap=True)
    return 0


def _spawned(settings: Settings, options: argparse.Namespace, console: Console) -> Runs:
    """Train on new processes, one run after the other."""
    shapes: list[Shape | None] = [*([] if options.mesh_only else [None]), *dict.fromkeys(options.mesh)]
    with _Steps(settings, shapes, console) as steps:
        return {shape: spawn(settings, shape, steps.done) for shape in shapes}


def _joined(settings: Settings, options: argparse.Namespace, console: Console) -> Runs | None:
    """Train on torchrun's ranks: they are one world, so there is one mesh, the last one that was asked for."""
    shape, alone = options.mesh[-1], not options.mesh_only
    console.quiet = os.environ["RANK"] != "0"
    with _Steps(settings, [shape, *([None] if alone else [])], console) as steps:
        return join(settings, shape, alone, steps.done)


class _Steps(Progress):
    """A progress bar for each run, with the loss of its latest step."""

    def __init__(self, settings: Settings, shapes: list[Shape | None], console: Console):
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        super().__init__(*columns, TextColumn("{task.fields[loss]}"), console=console)
        self.bars = {s: self.add_task(mesh_name(s), total=settings.steps, loss="", start=False) for s in shapes}

    def done(self, shape: Shape | None, loss: float | None) -> None:
        """Record that a run has begun, or that it has made a step with this loss."""
        if loss is None:
            self.start_task(self.bars[shape])
        else:
            self.update(self.bars[shape], advance=1, loss=f"loss {loss:.6f}")


def summary(report: Report) -> Table:
    table = Table(title=f"{report.settings.steps} steps on {report.settings.picture}")
    for heading in ("", "last loss", "furthest apart", "peak memory", "halos sent / least", "time of a step"):
        table.add_column(heading, justify="right" if heading else "left")
    for shape, runs in report.runs.items():
        apart = "" if shape is None or report.one is None else f"{max(report.differences(shape)):.1e}"
        sent, least = (0, 0) if shape is None else report.totals(shape)
        traffic = "" if shape is None else f"{size(sent)} / {size(least)}"
        memory, seconds = size(report.memory(shape)), f"{report.step_seconds(shape):.2f} s"
        table.add_row(mesh_name(shape), f"{runs[0].losses[-1]:.6f}", apart, memory, traffic, seconds)
    return table
