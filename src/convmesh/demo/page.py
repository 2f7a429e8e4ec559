"""The page: one file with everything in it, that needs no network and no script."""

from __future__ import annotations

import platform
from dataclasses import dataclass
from html import escape
from importlib import resources
from pathlib import Path
from statistics import median

import torch

from .. import _torch
from . import picture
from .charts import Curve, bars, curves, legend
from .halos import loupes, shard_map
from .settings import PICTURES, Settings, Shape, mesh_name
from .training import Run
from .traffic import Layer

COLORS = ("var(--two)", "var(--four)", "var(--six)")
ONE = "var(--one)"
Runs = dict[Shape | None, list[Run]]


@dataclass(frozen=True)
class Report:
    """All that the page tells. `runs` has the single process, if there was one, before the meshes."""

    settings: Settings
    runs: Runs
    command: str
    seconds: float

    @property
    def meshes(self) -> list[Shape]:
        return [shape for shape in self.runs if shape is not None]

    @property
    def largest(self) -> Shape:
        return max(self.meshes, key=lambda shape: shape[0] * shape[1])

    @property
    def one(self) -> Run | None:
        return self.runs[None][0] if None in self.runs else None

    def color(self, shape: Shape | None) -> str:
        return ONE if shape is None else COLORS[self.meshes.index(shape) % len(COLORS)]

    def differences(self, shape: Shape) -> list[float]:
        """Of each step's loss from that of one process, relative to it."""
        assert self.one is not None
        pairs = zip(self.runs[shape][0].losses, self.one.losses, strict=True)
        return [abs(loss - expected) / abs(expected) for loss, expected in pairs]

    def traffic(self, shape: Shape) -> list[tuple[Layer, int, int]]:
        """(layer, bytes of halos that all ranks sent for it in a step, the least possible)"""
        element = 8 if self.settings.double else 4
        rows = []
        for ranks in zip(*(run.layers for run in self.runs[shape]), strict=True):
            sides = ranks[0].sides
            rows.append((ranks[0], sum(layer.halo for layer in ranks), sides.least_bytes(element) if sides else 0))
        return rows

    def totals(self, shape: Shape) -> tuple[int, int]:
        rows = self.traffic(shape)
        return sum(sent for _, sent, _ in rows), sum(least for _, _, least in rows)

    def memory(self, shape: Shape | None) -> int:
        return max(run.memory for run in self.runs[shape])

    def step_seconds(self, shape: Shape | None) -> float:
        """A mesh is as slow as its slowest rank."""
        return max(median(run.seconds) for run in self.runs[shape])


def page(report: Report) -> str:
    sections = [_head(report), _shards(report), _results(report), _losses(report)]
    sections += [_costs(report), _traffic(report), _made(report)]
    style = resources.files(__package__).joinpath("style.css").read_text()
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>convmesh demo</title>'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<style>{style}</style></head><body><main>{''.join(sections)}</main></body></html>\n"
    )


def _head(report: Report) -> str:
    first = report.runs[report.largest][0]
    assert first.output is not None
    height, width = first.output.shape[:2]
    name = mesh_name(report.largest)
    cards = []
    if report.one is not None:
        worst = max(max(report.differences(shape)) for shape in report.meshes)
        cards.append((f"{worst:.1e}", "greatest relative difference between a mesh's loss and one process's, any step"))
        share = report.memory(report.largest) / report.memory(None)
        cards.append((f"{share:.2f} ×", f"peak memory of a rank on {name}, against one process"))
    sent, least = report.totals(report.largest)
    cards.append((f"{sent / least:.2f} ×" if least else "0", "halo bytes sent in a step, against the least possible"))
    gathered = sum(layer.other for run in report.runs[report.largest] for layer in run.layers)
    cards.append((kilobytes(gathered), "gathered: no activation is ever put together on one rank"))
    shown = "".join(f'<div class="card"><b class="num">{a}</b><span>{b}</span></div>' for a, b in cards)
    many = ", ".join(mesh_name(shape) for shape in report.meshes)
    return (
        '<p class="eyebrow">convmesh demo</p><h1>One U-Net, one picture, the same losses on any mesh</h1>'
        f'<p class="lead">{escape(PICTURES[report.settings.picture])}, {height} × {width} pixels: '
        f"a small U-Net learns to take noise away, in {len(first.losses)} steps from the same seed, on "
        f"{'one process and on ' if report.one else ''}{many}. The model is plain PyTorch and knows nothing of ranks.</p>"
        f'<div class="cards">{shown}</div>'
    )


def _shards(report: Report) -> str:
    clean = picture.to_bytes(picture.load(report.settings))
    layers = report.runs[report.largest][0].layers
    return (
        "<h2>Who has what of the picture</h2><p>Every rank reads only its own shard, and keeps the activations of that "
        "part alone. To compute the part of a layer's output that it owns, it reads a little more than it owns of the "
        f'input: the halo.</p><div class="panel"><div class="shards">{shard_map(clean, report.largest)}<div>'
        f"<h3>{mesh_name(report.largest).capitalize()}</h3><p class='soft'>Height is cut over the mesh dimension "
        "<code>h</code>, width over <code>w</code>, as <code>torch.chunk</code> cuts. The halos are drawn below to "
        f"scale, where the cuts meet: there one square is one pixel of the picture.</p></div></div></div>"
        '<div class="panel"><h3>What each layer reads across the cuts</h3><p class="soft">The shaded area is what a '
        "rank reads to compute its part. The layers with stride 2 need a halo on one side only; a pixel in the lower "
        f"levels is 2 or 4 pixels of the picture wide.</p>{loupes(clean, report.largest, layers)}</div>"
    )


def _results(report: Report) -> str:
    run = report.runs[report.largest][0]
    assert run.noisy is not None
    assert run.output is not None
    clean = picture.to_bytes(picture.load(report.settings))
    pictures = {"Input": run.noisy, "Output": run.output, "Target": clean}
    rows = clean.shape[0] // 2 - min(clean.shape[0] // 2, 70), clean.shape[0] // 2 + 70
    columns = clean.shape[1] // 2 - min(clean.shape[1] // 2, 70), clean.shape[1] // 2 + 70

    def figure(name: str, shown: torch.Tensor, words: str, css: str = "") -> str:
        return (
            f'<figure class="{css}"><img src="{picture.embedded(shown)}" alt="{name}">'
            f"<figcaption><b>{name}</b> {words}</figcaption></figure>"
        )

    words = {name: f"{picture.psnr(shown, clean):.1f} dB" for name, shown in pictures.items() if shown is not clean}
    whole = "".join(figure(name, shown, words.get(name, "")) for name, shown in pictures.items())
    near = "".join(
        figure(name, shown[rows[0] : rows[1], columns[0] : columns[1]].contiguous(), "where the cuts meet", "pixels")
        for name, shown in pictures.items()
    )
    return (
        f"<h2>What it learned</h2><p>Noise that the network has not seen in training, and what the network that "
        f"{mesh_name(report.largest)} trained makes of it. No seam shows where the shards meet, because there is none."
        f'</p><div class="panel"><div class="three">{whole}</div><div class="three" style="margin: 0">{near}</div></div>'
    )


def _losses(report: Report) -> str:
    looks = [(8.0, ""), (4.0, ""), (1.8, "6 5"), (1.2, "2 4")]
    lines = []
    for shape, (thick, dashes) in zip(report.runs, looks, strict=False):
        lines.append(Curve(mesh_name(shape), report.runs[shape][0].losses, report.color(shape), thick, dashes))
    keys = legend([(line.name, line.color) for line in lines])
    body = f'<div class="title">Mean squared error of each step</div>{curves(lines)}'
    told = "The losses of the meshes."
    if report.one is not None:
        apart = [Curve(mesh_name(s), report.differences(s), report.color(s), 2) for s in report.meshes]
        body += f'<div class="title">Relative difference from one process</div>{curves(apart, "low")}'
        worst = {shape: max(report.differences(shape)) for shape in report.meshes}
        said = " and ".join(f"{value:.1e} ({mesh_name(shape)})" for shape, value in worst.items())
        ulp = torch.finfo(torch.float64 if report.settings.double else torch.float32).eps
        told = (
            f"The curves lie on each other. They differ by at most {said}, where {ulp:.0e} is the rounding of a single "
            "operation: sums over the picture are added up in another order when it is cut, and training carries that on."
        )
    return f'<h2>The same losses</h2><p>{told}</p><div class="panel">{keys}{body}</div>'


def _costs(report: Report) -> str:
    memory, times = [], []
    for shape, runs in report.runs.items():
        for rank, run in enumerate(runs):
            name = mesh_name(shape) if shape is None else f"{shape[0]}x{shape[1]} · rank {rank}"
            memory.append((name, float(run.memory), f"{run.memory / 1e6:.0f} MB", report.color(shape)))
        seconds = report.step_seconds(shape)
        threads = f"{runs[0].threads} thread{'s' * (runs[0].threads > 1)}"
        name = f"{mesh_name(shape)}, {threads}{' each' * (shape is not None)}"
        times.append((name, seconds, f"{seconds:.2f} s", report.color(shape)))
    return (
        '<h2>Memory and time</h2><div class="columns"><div class="panel"><h3>Peak memory of each process</h3>'
        f'{bars(memory)}<p class="soft" style="margin: 16px 0 0"><small>By how much it grew at most while it trained.'
        '</small></p></div><div class="panel"><h3>Time of a step</h3>'
        f'{bars(times)}<p class="soft" style="margin: 16px 0 0"><small>The median, of the slowest rank. '
        f"{_sharing(report)}</small></p></div></div>"
    )


def _sharing(report: Report) -> str:
    run = report.runs[report.largest][0]
    cores, ranks = _cores(), len(report.runs[report.largest])
    if run.device != "cpu":
        return "Each rank has a GPU."
    if ranks > cores:
        return f"All processes share the same {cores} cores, so {ranks} ranks can save memory here, but no time."
    return f"All processes share the same {cores} cores."


def _traffic(report: Report) -> str:
    shape = report.largest
    rows = [row for row in report.traffic(shape) if row[1] or row[2] or row[0].sums]
    longest = max([sent for _, sent, _ in rows] + [1])
    sent, least = report.totals(shape)
    sums = sum(layer.sums for layer, _, _ in rows)
    lines = "".join(
        f"<tr><td>{escape(layer.name)}</td><td>{_or_dash(halo)}</td><td>{_or_dash(least)}</td>"
        f'<td class="meter"><i style="width: {halo / longest:.2%}"></i></td><td>{_or_dash(layer.sums)}</td></tr>'
        for layer, halo, least in rows
    )
    others = [f"{mesh_name(s)} sent {kilobytes(a)} of {kilobytes(b)}" for s in report.meshes if s != shape
              for a, b in [report.totals(s)]]  # fmt: skip
    return (
        f"<h2>What travels in a step</h2><p>On {mesh_name(shape)}, forward and backward. The least possible is what a "
        "rank's results depend on and others own: of the input forward, of the output's gradient backward, each "
        f'once.{" " + escape("; ".join(others)) + "." if others else ""}</p><div class="panel scroll"><table><thead>'
        "<tr><th>layer</th><th>halos sent, all ranks</th><th>least possible</th><th></th><th>sums, a rank</th></tr>"
        f"</thead><tbody>{lines}<tr class='total'><td>all</td><td>{kilobytes(sent)}</td><td>{kilobytes(least)}</td>"
        f"<td></td><td>{kilobytes(sums)}</td></tr></tbody></table></div>"
        '<p class="soft" style="margin-top: 12px"><small>Sums are what a rank puts into all-reduces: the statistics of '
        "norms, the loss, and the gradients of the weights, which travel while backward still runs.</small></p>"
    )


def _made(report: Report) -> str:
    run = report.runs[report.largest][0]
    facts = {
        "Machine": f"{_processor()}, {_cores()} cores, {platform.system()} {platform.machine()}",
        "Versions": f"convmesh {_torch.VERSION}, torch {torch.__version__}, Python {platform.python_version()}",
        "Ranks": f"{run.device}, {'gloo' if run.device == 'cpu' else 'nccl'}",
        "Network": f"U-Net of {' · '.join(map(str, report.settings.channels))} channels, "
        f"{0 if run.weights is None else run.weights.numel():,} weights, "
        f"{'float64' if report.settings.double else 'float32'}, Adam",
        "All runs took": f"{report.seconds:.0f} s",
    }
    listed = "".join(f"<dt>{escape(name)}</dt><dd>{escape(value)}</dd>" for name, value in facts.items())
    return (
        f'<h2>How this page was made</h2><div class="panel"><pre>{escape(report.command)}</pre><dl>{listed}</dl></div>'
    )


def kilobytes(size: int) -> str:
    return f"{size / 1e3:,.0f} kB" if size >= 1e4 or not size else f"{size / 1e3:,.1f} kB"


def _or_dash(size: int) -> str:
    return kilobytes(size) if size else "–"


def _cores() -> int:
    import os

    return len(os.sched_getaffinity(0))


def _processor() -> str:
    with Path("/proc/cpuinfo").open() as lines:
        names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()
