"""The tables of a plan, which the terminal and the page show: headings and rows of words."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from ..report.words import DASH, MINUS, duration, size
from .problem import words

if TYPE_CHECKING:
    from .plan import Plan
    from .runs import MeshRow


class Table(NamedTuple):
    headings: tuple[str, ...]
    rows: list[tuple[str, ...]]


def ranks(plan: Plan) -> Table:
    return Table(("rank", "peak", "at", "sends", "neighbours", "step"), [
        (rank.name, size(rank.memory.peak.total), f"{rank.memory.peak.layer or 'start'}, {rank.memory.peak.phase}",
         size(rank.bytes_sent), str(len(rank.neighbours)), duration(rank.time.step)) for rank in plan.ranks
    ])  # fmt: skip


def layers(plan: Plan) -> Table:
    """Make the table of layers, those that send most first."""

    def cell(number: int | None) -> str:
        return size(number) if number else DASH

    return Table(("layer", "forward", "backward", "halos", "the least", "sums and others", "messages"), [
        (row.layer, cell(row.forward_bytes), cell(row.backward_bytes), cell(row.halo_bytes), cell(row.least),
         cell(row.other_bytes), str(row.messages))
        for row in sorted(plan.busiest.layers, key=lambda layer: -layer.bytes)
    ])  # fmt: skip


def saved(plan: Plan) -> Table:
    rows = sorted(plan.largest.memory.saved.items(), key=lambda one: -one[1])
    return Table(("layer", "keeps for its backward pass"), [(layer, size(kept)) for layer, kept in rows])


def checkpoints(plan: Plan) -> Table:
    """Make the table of checkpointed blocks. Each row has those above it, too."""
    return Table(("checkpointed block", "peak", "longer by"), [
        ("none", size(plan.peak), DASH),
        *((row.block, size(row.peak), duration(row.seconds)) for row in plan.largest.checkpoints),
    ])  # fmt: skip


def along(plan: Plan) -> Table:
    sent = plan.busiest.bytes_along
    return Table(("mesh dimension", "ranks", "a rank sends"), [
        (name, str(plan.mesh[name]), size(sent[name])) for name in sent
    ])  # fmt: skip


def neighbours(plan: Plan) -> Table:
    return Table(("neighbour", "halos in a step"), [
        (", ".join(f"{name} {'+' if step > 0 else MINUS}{abs(step)}" for name, step in one.steps.items()),
         size(one.bytes)) for one in plan.busiest.neighbours
    ])  # fmt: skip


def meshes(rows: list[MeshRow]) -> Table:
    return Table(("mesh", "fits", "memory of a rank", "step", "a rank sends"), [
        (words(row.mesh), f"refuses {row.refused}" if row.refused else "yes" if row.fits else "no",
         size(row.memory) if row.fits else "too much", DASH if row.seconds is None else duration(row.seconds),
         DASH if row.bytes_sent is None else size(row.bytes_sent)) for row in rows
    ])  # fmt: skip
