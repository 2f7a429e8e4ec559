"""A plan in words: five lines, or all of it for a terminal."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from ..report.words import count, duration, size
from . import tables
from .problem import words
from .tables import Table

if TYPE_CHECKING:
    from .plan import Plan

SHOWN = 8  # rows of a table


def essence(plan: Plan) -> str:
    """Say what matters of a plan in five lines."""
    largest = plan.largest
    peak, time = largest.memory.peak, plan.slowest.time
    parts = sorted(peak.parts.items(), key=lambda part: -part[1])[:3]
    halos = sum(layer.halo_bytes for layer in plan.busiest.layers)
    kind, _, place = largest.name.partition("(")
    verdict = "fits" if plan.fits else "IS REFUSED" if largest.refusals else "DOES NOT FIT"
    return "\n".join([
        f"{words(plan.mesh)} of {plan.device.name}: {verdict}",
        f"memory: {size(plan.peak)} of {size(plan.device.memory)} on the {kind}rank ({place}, "
        f"at {peak.layer or 'the start'} ({peak.phase}): "
        + ", ".join(f"{kind} {size(held)}" for kind, held in parts if held),
        f"sent by a rank: halos {size(halos)}, sums and others {size(plan.busiest.bytes_sent - halos)}; "
        + ", ".join(f"along {name} {size(sent)}" for name, sent in plan.busiest.bytes_along.items()),
        f"time (an estimate): {duration(plan.seconds)}, compute {duration(time.compute)}, communication "
        f"{duration(time.communication)}, of which {duration(time.waiting)} is waited for",
        f"gathers: {len(plan.busiest.gathers) or 'none'}; refused: {len(largest.refusals) or 'nothing'}",
    ])  # fmt: skip


def report(plan: Plan) -> str:
    """Say all of a plan: the essence, advice, then tables."""
    return "\n".join([essence(plan), "", *_parts(plan)]).rstrip() + "\n"


def _parts(plan: Plan) -> Iterator[str]:
    yield from (f"- {line}" for line in plan.advice)
    yield ""
    enough = f"{count(plan.smallest, 'rank')} would fit" if plan.smallest else ""
    yield from _table("Meshes that were tried", tables.meshes(plan.meshes))
    yield from _table("More or fewer ranks", tables.meshes(plan.scaling), enough)
    yield from _table("Classes of ranks", tables.ranks(plan))
    yield from _table("What the busiest rank sends", tables.layers(plan))
    yield from _table("What the largest rank keeps", tables.saved(plan))
    if plan.largest.checkpoints:
        yield from _table("With activation checkpointing", tables.checkpoints(plan))


def _table(title: str, table: Table, note: str = "") -> list[str]:
    """Lay out a table: columns as wide as they have to be, all but the first to the right; nothing without rows."""
    if not table.rows:
        return []
    shown = table.rows[:SHOWN]
    widths = [max(map(len, column)) for column in zip(table.headings, *shown, strict=True)]

    def line(row: tuple[str, ...]) -> str:
        cells = (cell.rjust(width) if at else cell.ljust(width)
                 for at, (cell, width) in enumerate(zip(row, widths, strict=True)))  # fmt: skip
        return "  ".join(cells).rstrip()

    more = [f"and {len(table.rows) - len(shown)} more"] if len(table.rows) > len(shown) else []
    return [f"{title}:", line(table.headings), *map(line, shown), *more, *filter(None, [note]), ""]
