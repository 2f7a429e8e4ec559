"""What a plan means, in plain words: what to do first, and what it would give."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from ..report.words import count, duration, size
from .problem import ranks_of, words
from .timing import crosses_nodes
from .trace import Kind

if TYPE_CHECKING:
    from .plan import Plan

ROOM = 0.9  # of a device's memory: an allocator needs the rest
MUCH = 0.15  # of a step


def advice(plan: Plan) -> list[str]:
    """Return lines of advice, the most important first."""
    return [*_refused(plan), *_fit(plan), *_checkpoints(plan), *_nodes(plan), *_waiting(plan), *_gathers(plan)]


def _refused(plan: Plan) -> Iterator[str]:
    for one in plan.largest.refusals:
        where = f" (at {one.where})" if one.where else ""
        yield f"{one.layer} is refused on this mesh: {one.message}{where}. {one.remedy.capitalize()}"


def _fit(plan: Plan) -> Iterator[str]:
    peak, limit = plan.peak, plan.device.memory
    if peak > limit:
        yield (
            f"It does not fit: a rank needs {size(peak)} of {size(limit)} ({plan.device.name}). "
            "Take more ranks, checkpoint activations, or compute in bf16."
        )
    elif peak > ROOM * limit:
        yield (f"It fits with little to spare: {size(peak)} of {size(limit)}. What an allocator keeps comes on top.")
    if plan.smallest is not None and plan.smallest != ranks_of(plan.mesh):
        row = next(row for row in plan.scaling if row.ranks == plan.smallest)
        time = "" if row.seconds is None else f", in {duration(row.seconds)} a step"
        needs = size(row.memory) if row.ranks == 1 else f"with {words(row.mesh)}, {size(row.memory)} each"
        yield f"{count(plan.smallest, 'rank')} would be enough: {needs}{time}."


def _checkpoints(plan: Plan) -> Iterator[str]:
    rows = plan.largest.checkpoints
    if not rows or plan.largest.memory.peak.parts[Kind.ACTIVATIONS] < 0.2 * plan.peak:
        return
    first, last = rows[0], rows[-1]
    yield (
        f"Checkpointing {first.block} saves {size(plan.peak - first.peak)} of {size(plan.peak)} and costs "
        f"{duration(first.seconds)} a step."
        + (f" With {', '.join(row.block for row in rows[1:])} as well, the peak is {size(last.peak)}."
           if len(rows) > 1 else "")
    )  # fmt: skip


def _nodes(plan: Plan) -> Iterator[str]:
    """Say which mesh dimension to put within nodes: the last ones are, so the busiest one should be last."""
    along = {name: sent for name, sent in plan.busiest.bytes_along.items() if plan.mesh[name] > 1}
    apart = [name for name in along if crosses_nodes(name, plan.mesh, plan.device.node_ranks)]
    inside = [name for name in along if name not in apart]
    if not apart:
        return
    sent = sum(along[name] for name in apart)
    best = min(inside, key=lambda name: along[name], default=None)
    worst = max(apart, key=lambda name: along[name])
    if best is not None and along[best] < 0.8 * along[worst]:
        yield (
            f"Put {worst} within nodes of {plan.device.node_ranks} ranks and {best} between them, as the first mesh "
            f"dimension: along {worst} a rank sends {size(along[worst])} a step, along {best} {size(along[best])}."
        )
    else:
        yield f"{_joined(apart)} between nodes is the right order: {size(sent)} a step of a rank cross them."


def _waiting(plan: Plan) -> Iterator[str]:
    time = plan.slowest.time
    if time.waiting > MUCH * time.step:
        yield (
            f"Ranks wait {duration(time.waiting)} of {duration(time.step)} for communication that no compute hides: "
            "fewer ranks, or more samples, use the devices better."
        )


def _gathers(plan: Plan) -> Iterator[str]:
    for one in plan.busiest.gathers:
        where = f" (at {one.where})" if one.where else ""
        yield f"{one.layer} gathers {size(one.bytes)} of each rank{where}: {one.remedy}."


def _joined(names: list[str]) -> str:
    return " and ".join(names)
