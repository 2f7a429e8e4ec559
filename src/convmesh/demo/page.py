"""The page: what the runs have reported, for the template."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from markupsafe import Markup

from ..report.charts import Curve, bars, curves, legend
from ..report.page import render, scientific
from ..report.shards import plane
from ..report.words import TIMES, size
from . import halos, picture
from .machine import cores, facts
from .report import Report
from .settings import PICTURES, Shape, mesh_name
from .training import Run

COLORS = ("var(--two)", "var(--four)", "var(--six)")
ONE = "var(--one)"
LOOKS = [(11.0, ""), (5.0, ""), (2.4, "8 8"), (1.2, "2 4")]  # line width and dashes, as the curves coincide
NEAR = 70  # pixels around the middle


def _color(report: Report, shape: Shape | None) -> str:
    return ONE if shape is None else COLORS[report.meshes.index(shape) % len(COLORS)]


def page(report: Report) -> str:
    clean = picture.to_bytes(picture.load(report.settings))
    run, shape = report.runs[report.largest][0], report.largest
    rows = [row for row in report.traffic(shape) if row[1] or row[2] or row[0].sums]
    memory, times = _costs(report)
    full, near = _pictures(run, clean)
    return render(
        __package__, "demo.html", report=report, picture=PICTURES[report.settings.picture], height=clean.shape[0],
        width=clean.shape[1], steps=len(run.losses), largest=mesh_name(shape),
        meshes=[f"{one[0]}x{one[1]}" for one in report.meshes], cards=_cards(report), rows=rows,
        shards=plane(clean.shape[:2], shape, picture.embedded(clean)), keys=halos.keys(shape),
        close_ups=halos.close_ups(clean, shape, run.layers), full=full, near=near, losses=_losses(report),
        worst=[] if report.one is None else [(mesh_name(one), max(report.differences(one))) for one in report.meshes],
        rounding=torch.finfo(torch.float64 if report.settings.double else torch.float32).eps, memory=memory,
        times=times, sharing=_sharing(report), longest=max([sent for _, sent, _ in rows] + [1]),
        totals=report.totals(shape), facts=facts(report),
        others=[(mesh_name(other), *report.totals(other)) for other in report.meshes if other != shape],
    )  # fmt: skip


def _cards(report: Report) -> list[tuple[str | Markup, str]]:
    """Return (figure, caption) of the summary at the top of the page."""
    name = mesh_name(report.largest)
    cards: list[tuple[str | Markup, str]] = []
    if report.one is not None:
        worst = max(max(report.differences(shape)) for shape in report.meshes)
        cards.append((scientific(worst), "greatest relative difference of a mesh's loss from one process's"))
        share = report.memory(report.largest) / report.memory(None)
        cards.append((f"{share:.2f} {TIMES}", f"peak memory of a rank on {name}, against one process"))
    sent, least = report.totals(report.largest)
    cards.append(
        (f"{sent / least:.2f} {TIMES}" if least else "0 B", "halos sent in a step, against the least possible")
    )
    gathered = sum(layer.other for run in report.runs[report.largest] for layer in run.layers)
    cards.append((size(gathered), "gathered in a step, by any rank, of any activation"))
    return cards


class _Picture(NamedTuple):
    name: str
    address: str
    words: str


def _pictures(run: Run, clean: torch.Tensor) -> tuple[list[_Picture], list[_Picture]]:
    """Return the full pictures, and close-ups of where the shards meet."""
    assert run.noisy is not None
    assert run.output is not None
    middle = [extent // 2 for extent in clean.shape[:2]]
    rows, columns = (slice(at - min(at, NEAR), at + NEAR) for at in middle)
    full, near = [], []
    for name, shown in {"Input": run.noisy, "Output": run.output, "Target": clean}.items():
        words = "" if shown is clean else f"{picture.psnr(shown, clean):.1f} dB"
        full.append(_Picture(name, picture.embedded(shown), words))
        near.append(_Picture(name, picture.embedded(shown[rows, columns].contiguous()), "where the shards meet"))
    return full, near


def _losses(report: Report) -> dict[str, Any]:
    """Return the charts of the losses, and of their differences from one process."""
    lines = [
        Curve(mesh_name(shape), runs[0].losses, _color(report, shape), *look)
        for (shape, runs), look in zip(report.runs.items(), LOOKS, strict=False)
    ]
    apart: list[Curve] = []
    if report.one is not None:
        apart = [Curve(mesh_name(s), report.differences(s), _color(report, s), 2) for s in report.meshes]
    return {
        "legend": legend([(line.name, line.color, "") for line in lines]), "curves": curves(lines),
        "apart": curves(apart, "low") if apart else "",
    }  # fmt: skip


def _costs(report: Report) -> tuple[Markup, Markup]:
    """Return the charts of peak memory and of step times."""
    memory, times = [], []
    for shape, runs in report.runs.items():
        for rank, run in enumerate(runs):
            name = mesh_name(shape) if shape is None else f"{shape[0]}x{shape[1]} · rank {rank}"
            memory.append((name, float(run.memory), f"{size(run.memory)}", _color(report, shape)))
        seconds = report.step_seconds(shape)
        threads = f"{runs[0].threads} thread{'s' * (runs[0].threads > 1)}"
        name = f"{mesh_name(shape)}, {threads}{' each' * (shape is not None)}"
        times.append((name, seconds, f"{seconds:.2f} s", _color(report, shape)))
    return bars(memory), bars(times)


def _sharing(report: Report) -> str:
    run = report.runs[report.largest][0]
    here, ranks = cores(), len(report.runs[report.largest])
    if run.device != "cpu":
        return "Each rank has a GPU."
    if ranks > here:
        return f"All processes share the same {here} cores, so {ranks} ranks can save memory here, but no time."
    return f"All processes share the same {here} cores."
