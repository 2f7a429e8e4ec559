"""A plan in words: five lines, or all of it for a terminal."""

from __future__ import annotations

from math import log10
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .plan import Plan

SHOWN = 8  # rows of a table


def bytes_words(count: float) -> str:
    units = ["B", "kB", "MB", "GB", "TB"]
    while count >= 1000 and len(units) > 1:
        count /= 1000
        units.pop(0)
    digits = 0 if units[0] == "B" or count <= 0 else max(0, 2 - int(log10(count)))
    return f"{count:.{digits}f} {units[0]}"


def seconds_words(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1e3:.1f} ms"


def essence(plan: Plan) -> str:
    """Five lines."""
    from .plan import words

    largest = plan.largest
    peak, time = largest.memory.peak, largest.time
    parts = sorted(peak.parts.items(), key=lambda part: -part[1])[:3]
    halos = sum(layer.halo_bytes for layer in largest.layers)
    others = sum(layer.reduction_bytes + layer.gather_bytes for layer in largest.layers)
    return "\n".join([
        f"{words(plan.mesh)} of {plan.device.name}: {'fits' if plan.fits else 'DOES NOT FIT'}",
        f"memory: {bytes_words(plan.peak)} of {bytes_words(plan.device.memory)} on the {largest.name} rank, "
        f"at {peak.layer} ({peak.phase}): " + ", ".join(f"{kind} {bytes_words(size)}" for kind, size in parts if size),
        f"sent by a rank: halos {bytes_words(halos)}, reductions and others {bytes_words(others)}; "
        + ", ".join(f"along {name} {bytes_words(size)}" for name, size in largest.bytes_along.items()),
        f"time (an estimate): {seconds_words(plan.seconds)}, compute {seconds_words(time.compute)}, communication "
        f"{seconds_words(time.communication)}, of which {seconds_words(time.waiting)} is waited for",
        f"gathers: {len(largest.gathers) or 'none'}",
    ])  # fmt: skip


def report(plan: Plan) -> str:
    """The essence, then tables."""
    from .plan import columns

    lines = [essence(plan), ""]
    lines += _table(("rank", "peak", "sent", "time"), [
        (rank.name, bytes_words(rank.memory.peak.total), bytes_words(sum(rank.bytes_along.values())),
         seconds_words(rank.time.step)) for rank in plan.ranks
    ])  # fmt: skip
    layers = sorted(plan.largest.layers, key=lambda layer: -(layer.forward_bytes + layer.backward_bytes))
    lines += _table(("layer that sends most", "forward", "backward", "messages"), [
        (layer.layer, bytes_words(layer.forward_bytes), bytes_words(layer.backward_bytes), str(layer.messages))
        for layer in layers
    ])  # fmt: skip
    saved = sorted(plan.largest.memory.saved.items(), key=lambda one: -one[1])
    lines += _table(("layer that keeps most activations", "kept"), [(name, bytes_words(size)) for name, size in saved])
    if plan.meshes:
        lines += _table(("mesh", "fits", "memory", "time", "sent"), columns(plan.meshes))
    for gather in plan.largest.gathers:
        lines.append(
            f"gathered: {bytes_words(gather.bytes)} by {gather.layer} at {gather.where or 'its backward pass'}"
        )
    return "\n".join(lines).rstrip() + "\n"


def _table(headings: tuple[str, ...], rows: list[tuple[str, ...]]) -> list[str]:
    """Columns as wide as they have to be, all but the first to the right."""
    shown = rows[:SHOWN]
    widths = [max(len(row[at]) for row in [headings, *shown]) for at in range(len(headings))]

    def line(row: tuple[str, ...]) -> str:
        first, *rest = (cell.ljust(width) if not at else cell.rjust(width)
                        for at, (cell, width) in enumerate(zip(row, widths, strict=True)))  # fmt: skip
        return "  ".join([first, *rest])

    more = [f"and {len(rows) - len(shown)} more"] if len(rows) > len(shown) else []
    return [line(headings), *map(line, shown), *more, ""]
