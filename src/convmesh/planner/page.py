"""A plan as a page: the volume and its halos, memory over the step, traffic, time, and the meshes that were tried."""

from __future__ import annotations

from itertools import pairwise, zip_longest
from typing import TYPE_CHECKING, Any, NamedTuple

from markupsafe import Markup

from ..geometry import Interval
from ..report import shards
from ..report.areas import Point, areas
from ..report.charts import legend, stacked
from ..report.page import render
from ..report.words import DASH, TIMES, count, duration, size
from . import tables
from .needs import Need
from .problem import words
from .timing import Bound
from .trace import Kind

if TYPE_CHECKING:
    from .memory import Moment
    from .plan import Plan

COLORS = {kind: f"var(--k{number})" for number, kind in enumerate(Kind, 1)}
BOUNDS = {Bound.ARITHMETIC: "var(--two)", Bound.MEMORY: "var(--k7)", Bound.OVERHEAD: "var(--one)"}
LOUPE = 24  # the side of a loupe's square, in indices of the input
LOUPES, LAYERS, MESHES = 8, 16, 12  # how many are shown at once


def page(plan: Plan) -> str:
    return render(
        __package__, "plan.html", plan=plan, name=words(plan.mesh), cards=_cards(plan), volume=_volume(plan),
        loupes=_loupes(plan), loupe_keys=_keys(), memory=_memory(plan), kinds=_kinds(plan), time=_time(plan),
        layers=_layers(plan),
        scaling=_scaling(plan), meshes=tables.meshes(plan.meshes), shown=(LAYERS, MESHES), ranks=tables.ranks(plan),
        neighbours=tables.neighbours(plan), saved=tables.saved(plan), along=tables.along(plan),
        headings=tables.layers(plan).headings, checkpoints=tables.checkpoints(plan),
    )  # fmt: skip


def _cards(plan: Plan) -> list[tuple[str, str]]:
    halos = sum(layer.halo_bytes for layer in plan.busiest.layers)
    return [
        (size(plan.peak), f"at the peak, of {size(plan.device.memory)}: {plan.device.name}"),
        (
            duration(plan.seconds),
            f"for a training step, an estimate; {duration(plan.slowest.time.waiting)} of it waiting",
        ),
        (size(plan.busiest.bytes_sent), f"sent by a rank in a step, {size(halos)} of it halos"),
        (
            str(plan.smallest or DASH),
            "no number of ranks that was tried fits"
            if plan.smallest is None
            else f"{'rank is' if plan.smallest == 1 else 'ranks are'} the fewest that fit",
        ),
    ]


class _Sharded(NamedTuple):
    """The spatial dimensions of the input: names, sizes and the ranks that share each."""

    names: tuple[str, ...]
    sizes: tuple[int, ...]
    parts: tuple[int, ...]


def _sharded(plan: Plan) -> _Sharded:
    shape = next(iter(plan.inputs.values())).shape
    names = {dim: name for name, dim in plan.dims.items() if plan.mesh.get(name, 1) > 1}
    dims = range(2, len(shape)) if len(shape) > 2 else range(len(shape))
    return _Sharded(
        tuple(names.get(dim, "") for dim in dims), tuple(shape[dim] for dim in dims),
        tuple(plan.mesh.get(names.get(dim, ""), 1) for dim in dims),
    )  # fmt: skip


def _volume(plan: Plan) -> Markup:
    """Draw the input in shards, and what the rank that sends most reads in its first layer."""
    _, sizes, parts = _sharded(plan)
    reads = _busiest_reads(plan)
    halo = None if reads is None else tuple(side.read for side in reads.sides)
    if len(sizes) == 3:
        return shards.volume(sizes, parts, halo)
    rows, ranks = ((1,) * (2 - len(sizes)) + values for values in (sizes, parts))
    if halo is not None:
        halo = (Interval(0, 1),) * (2 - len(halo)) + halo
    return shards.plane(rows, ranks, halo=halo)


def _busiest_reads(plan: Plan) -> Need | None:
    """Return what the first layer at the resolution of the input reads."""
    sizes = _sharded(plan).sizes
    fitting = (need for need in plan.busiest.reads if tuple(side.size for side in need.sides) == sizes)
    return next((need for need in fitting if any(side.read != side.owned for side in need.sides)), None)


def _loupes(plan: Plan) -> list[dict[str, Any]]:
    """Draw layers with halos, one of each kind, in the plane of the two dimensions that are most sharded."""
    _, sizes, parts = _sharded(plan)
    if len(sizes) < 2:
        return []
    axes = sorted(sorted(range(len(sizes)), key=lambda axis: -parts[axis])[:2])
    flat = [sizes[axis] for axis in axes]
    corner, side = shards.window(flat, [parts[axis] for axis in axes], LOUPE)
    low, high = _across(plan, axes)
    found: dict[tuple[object, ...], dict[str, Any]] = {}
    for first, second in zip_longest(low, high):
        pair = [need for need in (first, second) if need is not None and len(need.sides) == len(sizes)]
        if not any(part.read != part.owned for need in pair for part in need.sides):
            continue
        one = pair[0]
        scale = sizes[axes[0]] / one.sides[axes[0]].size
        ranks = [
            (number, tuple(need.sides[axis].owned for axis in axes), tuple(need.sides[axis].read for axis in axes))
            for number, need in enumerate(pair)
        ]  # fmt: skip
        widths = tuple((p.owned.start - p.read.start, p.read.stop - p.owned.stop) for n in pair for p in n.sides)
        found.setdefault((scale, widths), {
            "layer": one.layer, "sizes": f" {TIMES} ".join(str(part.size) for part in one.sides),
            "drawing": shards.loupe(ranks, corner, side, scale),
        })  # fmt: skip
    return list(found.values())[:LOUPES]


def _keys() -> Markup:
    pairs = [(shards.color(number), f"{which} rank") for number, which in enumerate(("one", "another"))]
    looks = [("owns", "box"), ("reads", "box dashed")]
    return legend([(f"{who} {what}", color, look) for color, who in pairs for what, look in looks])


def _across(plan: Plan, axes: list[int]) -> tuple[list[Need], list[Need]]:
    """Return what two ranks read whose shards meet where the first ones along these dimensions end."""

    def at(place: int) -> list[Need]:
        for rank in plan.ranks:
            sides = rank.reads[0].sides if rank.reads else ()
            first = [sides[axis].owned.start == 0 or sides[axis].ranks == 1 for axis in axes if len(sides) > axis]
            if first and all(one if place == 0 else (not one or sides[axis].ranks == 1)
                             for one, axis in zip(first, axes, strict=True)):  # fmt: skip
                return rank.reads
        return []

    return at(0), at(1)


def _memory(plan: Plan) -> Markup:
    curve = plan.largest.memory.curve
    depth = _depth([moment.layer for moment in curve])
    kinds = [kind for kind in Kind if any(moment.parts[kind] for moment in curve)]
    points = [
        Point([moment.parts[kind] for kind in kinds], ".".join(moment.layer.split(".")[:depth]) or "start",
              moment.phase, _said(moment)) for moment in curve
    ]  # fmt: skip
    limit = plan.device.memory, f"{plan.device.name}: {size(plan.device.memory)}"
    keys = legend([(kind, COLORS[kind], "box filled") for kind in kinds])
    return keys + areas(points, [(kind, COLORS[kind]) for kind in kinds], size, limit)


def _depth(layers: list[str]) -> int:
    """Return how many parts of layers' names to show: such that there are some groups, and not too many."""
    for depth in (1, 2, 3, 4):
        names = [".".join(layer.split(".")[:depth]) for layer in layers]
        if sum(a != b for a, b in pairwise(names)) >= 8:
            return depth
    return 4


def _said(moment: Moment) -> str:
    parts = [f"{kind}: {size(moment.parts[kind])}" for kind in Kind if moment.parts[kind]]
    return "\n".join([f"{size(moment.total)} at {moment.layer or 'the start'}, {moment.phase}", *parts])


def _kinds(plan: Plan) -> list[tuple[str, str, str, str]]:
    """Return rows of (kind, bytes at the peak, share, color)."""
    peak = plan.largest.memory.peak
    rows = sorted(peak.parts.items(), key=lambda part: -part[1])
    return [
        (kind, size(held), f"{held / peak.total:.0%}" if held > 0.005 * peak.total else "< 1%", COLORS[kind])
        for kind, held in rows
        if held
    ]


def _time(plan: Plan) -> dict[str, Any]:
    time = plan.slowest.time
    hidden = max(0.0, time.communication - time.waiting)
    parts = [(str(bound), seconds, BOUNDS[bound]) for bound, seconds in time.bounds.items()]
    parts.append(("waiting for communication", time.waiting, "var(--four)"))
    return {
        "bar": stacked(parts, time.step),
        "legend": legend([(f"{name} {duration(seconds)}", color, "box filled") for name, seconds, color in parts]),
        "hidden": duration(hidden), "communication": duration(time.communication),
    }  # fmt: skip


def _layers(plan: Plan) -> list[dict[str, Any]]:
    rows = sorted(plan.busiest.layers, key=lambda layer: -layer.bytes)
    longest = max([row.bytes for row in rows] + [1])
    return [
        {"cells": cells, "bars": [(row.halo_bytes / longest, "var(--four)"),
                                  ((row.reduction_bytes + row.reshard_bytes) / longest, "var(--two)"),
                                  (row.gather_bytes / longest, "var(--bad)")]}
        for row, cells in zip(rows, tables.layers(plan).rows, strict=True)
    ]  # fmt: skip


def _scaling(plan: Plan) -> list[dict[str, Any]]:
    most = max([row.memory for row in plan.scaling] + [1])
    slowest = max([row.seconds or 0.0 for row in plan.scaling] + [1e-12])
    return [
        {"name": count(row.ranks, "rank"), "fits": row.fits, "memory": row.memory / most,
         "memory_words": size(row.memory) if row.fits else f"over {size(plan.device.memory)}",
         "time": (row.seconds or 0) / slowest, "time_words": DASH if row.seconds is None else duration(row.seconds)}
        for row in plan.scaling
    ]  # fmt: skip
