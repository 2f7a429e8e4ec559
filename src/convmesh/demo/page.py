"""The page: one file with everything in it, that needs no network and no script."""

from __future__ import annotations

from html import escape
from importlib import resources

import torch

from . import picture
from .charts import Curve, bars, curves, legend
from .halos import loupes, shard_map
from .machine import cores, facts
from .report import Report, size
from .settings import PICTURES, Shape, mesh_name

COLORS = ("var(--two)", "var(--four)", "var(--six)")
ONE = "var(--one)"
CODE = "model = convmesh.distribute(model, mesh)\nx = convmesh.shard(x, mesh, h=2, w=3)"


def _color(report: Report, shape: Shape | None) -> str:
    return ONE if shape is None else COLORS[report.meshes.index(shape) % len(COLORS)]


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
        cards.append((_scientific(worst), "greatest relative difference of a mesh's loss from one process's"))
        share = report.memory(report.largest) / report.memory(None)
        cards.append((f"{share:.2f} &times;", f"peak memory of a rank on {name}, against one process"))
    sent, least = report.totals(report.largest)
    cards.append(
        (f"{sent / least:.2f} &times;" if least else "0 B", "halos sent in a step, against the least possible")
    )
    gathered = sum(layer.other for run in report.runs[report.largest] for layer in run.layers)
    cards.append((size(gathered), "gathered in a step, by any rank, of any activation"))
    shown = "".join(f'<div class="card"><b class="num">{a}</b><span>{b}</span></div>' for a, b in cards)
    many = " and ".join(f"{shape[0]}x{shape[1]}" for shape in report.meshes)
    return (
        '<p class="eyebrow">convmesh demo</p><h1>One U-Net, one picture, the same losses on any mesh</h1>'
        f'<p class="lead">{escape(PICTURES[report.settings.picture])}, {height} &times; {width} pixels: '
        f"a small U-Net learns to take noise away, in {len(first.losses)} steps from the same seed, on "
        f"{'one process and on ' if report.one else ''}{many} ranks. "
        f'The model is plain PyTorch and knows nothing of ranks.</p><div class="cards">{shown}</div>'
    )


def _shards(report: Report) -> str:
    clean = picture.to_bytes(picture.load(report.settings))
    layers = report.runs[report.largest][0].layers
    return (
        "<h2>Who has what of the picture</h2><p>Every rank has its own shard of the picture, and of every activation. "
        "To compute its part of a layer's output it reads a little more of the input than it owns: the halo.</p>"
        f'<div class="panel"><div class="shards">{shard_map(clean, report.largest)}<div>'
        f"<h3>{mesh_name(report.largest).capitalize()}</h3><p class='soft'>Height is sharded over the mesh dimension "
        "<code>h</code>, width over <code>w</code>, as <code>torch.chunk</code> does. Two lines of the training "
        f"know of it:</p><pre class='code'>{CODE}</pre></div></div></div>"
        '<div class="panel"><h3>What each layer reads of other shards</h3><p class="soft">To scale, where the shards '
        "meet: one square is one pixel of the picture. Shaded is what a rank reads to compute its part. With a stride "
        "the halo may be on one side only. On the lower levels a pixel is 2 or 4 pixels of the picture wide.</p>"
        f"{loupes(clean, report.largest, layers)}</div>"
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
        figure(name, shown[rows[0] : rows[1], columns[0] : columns[1]].contiguous(), "where the shards meet", "pixels")
        for name, shown in pictures.items()
    )
    return (
        f"<h2>What it learned</h2><p>Noise that the network has not seen in training, and what the network that "
        f"{mesh_name(report.largest)} trained makes of it. No seam shows where the shards meet, because there is none."
        f'</p><div class="panel"><div class="three">{whole}</div><div class="three last">{near}</div></div>'
    )


def _losses(report: Report) -> str:
    looks = [(11.0, ""), (5.0, ""), (2.4, "8 8"), (1.2, "2 4")]
    lines = []
    for shape, (thick, dashes) in zip(report.runs, looks, strict=False):
        lines.append(Curve(mesh_name(shape), report.runs[shape][0].losses, _color(report, shape), thick, dashes))
    keys = legend([(line.name, line.color, "") for line in lines])
    body = f'<div class="title">Mean squared error of each step</div>{curves(lines)}'
    told = "The losses of the meshes."
    if report.one is not None:
        apart = [Curve(mesh_name(s), report.differences(s), _color(report, s), 2) for s in report.meshes]
        body += f'<div class="title">Relative difference from one process</div>{curves(apart, "low")}'
        worst = {shape: max(report.differences(shape)) for shape in report.meshes}
        said = " and ".join(f"{_scientific(value)} ({mesh_name(shape)})" for shape, value in worst.items())
        ulp = torch.finfo(torch.float64 if report.settings.double else torch.float32).eps
        told = (
            f"The curves lie on each other. They differ by at most {said}, where {_scientific(ulp)} is the rounding of "
            "one operation: sums over a sharded picture are added up in another order, and training carries it on."
        )
    return f'<h2>The same losses</h2><p>{told}</p><div class="panel">{keys}{body}</div>'


def _costs(report: Report) -> str:
    memory, times = [], []
    for shape, runs in report.runs.items():
        for rank, run in enumerate(runs):
            name = mesh_name(shape) if shape is None else f"{shape[0]}x{shape[1]} · rank {rank}"
            memory.append((name, float(run.memory), f"{size(run.memory)}", _color(report, shape)))
        seconds = report.step_seconds(shape)
        threads = f"{runs[0].threads} thread{'s' * (runs[0].threads > 1)}"
        name = f"{mesh_name(shape)}, {threads}{' each' * (shape is not None)}"
        times.append((name, seconds, f"{seconds:.2f} s", _color(report, shape)))
    return (
        '<h2>Memory and time</h2><div class="columns"><div class="panel"><h3>Peak memory of each process</h3>'
        f'{bars(memory)}<p class="note"><small>By how much it grew at most while it trained; '
        "processes that the demo starts itself give freed memory back at once "
        "(<code>MALLOC_MMAP_THRESHOLD_=1048576</code>)."
        '</small></p></div><div class="panel"><h3>Time of a step</h3>'
        f'{bars(times)}<p class="note"><small>The median, of the slowest rank. '
        f"{_sharing(report)}</small></p></div></div>"
    )


def _sharing(report: Report) -> str:
    run = report.runs[report.largest][0]
    here, ranks = cores(), len(report.runs[report.largest])
    if run.device != "cpu":
        return "Each rank has a GPU."
    if ranks > here:
        return f"All processes share the same {here} cores, so {ranks} ranks can save memory here, but no time."
    return f"All processes share the same {here} cores."


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
    others = [(mesh_name(other), *report.totals(other)) for other in report.meshes if other != shape]
    also = "".join(f" {name.capitalize()} sent {size(a)}, the least being {size(b)}." for name, a, b in others)
    return (
        f"<h2>Communication in a step</h2><p>On {mesh_name(shape)}, forward and backward. The least possible is what a "
        "rank's results depend on and others own: of the input forward, of the output's gradient backward, each "
        f'once, for all ranks together.{also}</p><div class="panel scroll"><table><thead>'
        '<tr><th>layer</th><th>halos sent</th><th>the least</th><th class="meter"></th><th>sums</th></tr>'
        f"</thead><tbody>{lines}<tr class='total'><td>all</td><td>{size(sent)}</td><td>{size(least)}</td>"
        f"<td class='meter'></td><td>{size(sums)}</td></tr></tbody></table></div>"
        '<p class="note"><small>Sums are what one rank puts into all-reduces: the statistics of norms, the loss, and '
        "the gradients of the weights.</small></p>"
    )


def _made(report: Report) -> str:
    listed = "".join(f"<dt>{escape(name)}</dt><dd>{escape(value)}</dd>" for name, value in facts(report).items())
    return (
        f'<h2>How this page was made</h2><div class="panel"><pre>{escape(report.command)}</pre><dl>{listed}</dl></div>'
    )


def _or_dash(count: int) -> str:
    return size(count) if count else "&ndash;"


def _scientific(number: float) -> str:
    digits, power = f"{number:.1e}".split("e")
    return f"{digits}&middot;10<sup>{int(power)}</sup>" if number else "0"
