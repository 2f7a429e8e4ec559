"""Choosing, for each mesh dimension, the row of an operator's sharding table that moves the least data."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from math import inf, prod

from torch.distributed.tensor.placement_types import Partial, Placement, Replicate, Shard

from .errors import refuse
from .layout import Layout


@dataclass(frozen=True)
class Row:
    """One way to run an operator along one mesh dimension: how its inputs are placed, and so its outputs."""

    name: str
    inputs: tuple[Placement, ...]
    outputs: tuple[Placement, ...]


# A move along a mesh dimension of one rank sends nothing, and yet staying is better: other mesh dimensions may cut the
# same dimension, and torch then moves along all of them.
MOVING = 1e-6

Assignment = tuple[Row, ...]
"""A row for every mesh dimension."""


def input_placements(assignment: Assignment, number: int) -> tuple[Placement, ...]:
    return tuple(row.inputs[number] for row in assignment)


def output_placements(assignment: Assignment, number: int) -> tuple[Placement, ...]:
    return tuple(row.outputs[number] for row in assignment)


@dataclass(frozen=True)
class Wanted:
    """An output of `count` elements should be placed `like` this; a replicated one may also stay a pending sum.

    With `or_sharded` it may stay sharded, too: what is sharded is whole without gathering it.
    """

    like: tuple[Placement, ...]
    count: int
    or_sharded: bool = False

    def becomes(self, mesh_dim: int, placement: Placement) -> Placement:
        """Where an output that a row leaves at `placement` goes in the end."""
        wanted = self.like[mesh_dim]
        if isinstance(wanted, Shard):
            return wanted
        return Replicate() if isinstance(placement, Shard) and not self.or_sharded else placement


def choose(
    operator: str,
    rows: Sequence[Row],
    named: Sequence[tuple[str, Layout | None]],
    wanted: Sequence[Wanted | None] = (),
    fits: Callable[[Assignment], bool] = lambda assignment: True,
    extra: Callable[[Row, int], float] = lambda row, mesh_dim: 0.0,
) -> Assignment:
    """The assignment that moves the fewest elements and that `fits`; the earlier row wins a tie.

    `extra` is what a row costs along a mesh dimension beside that, in elements.
    """
    inputs = [layout for _, layout in named]
    mesh = next(layout.mesh for layout in inputs if layout is not None)
    priced = [
        sorted(
            (_price(row, mesh_dim, mesh.size(mesh_dim), inputs, wanted) + extra(row, mesh_dim), number)
            for number, row in enumerate(rows)
        )
        for mesh_dim in range(mesh.ndim)
    ]
    for numbers in _cheapest_first(priced):
        assignment = tuple(rows[number] for number in numbers)
        if fits(assignment):
            return assignment
    raise refuse(operator, "no row of its sharding table fits", named, "redistribute to Shard or Replicate first")


def _cheapest_first(priced: Sequence[Sequence[tuple[float, int]]]) -> Iterator[tuple[int, ...]]:
    possible = [[entry for entry in entries if entry[0] < inf] for entries in priced]
    first = tuple(entries[0][1] for entries in possible if entries)
    if len(first) < len(priced):
        return
    yield first  # nearly always fits, which spares the sorting
    every = sorted((sum(price for price, _ in entries), tuple(n for _, n in entries)) for entries in product(*possible))
    yield from (numbers for _, numbers in every)


def _price(
    row: Row, mesh_dim: int, size: int, inputs: Sequence[Layout | None], wanted: Sequence[Wanted | None]
) -> float:
    """Elements that a rank receives along a mesh dimension of `size` ranks if it takes this row."""
    price = 0.0
    for layout, target in zip(inputs, row.inputs, strict=True):
        if layout is not None:
            local = prod(layout.shape) / prod(layout.mesh.size(m) for dims in layout.cuts.values() for m in dims)
            price += _moved(layout.placements[mesh_dim], target, local, size)
    for want, source in zip(wanted, row.outputs, strict=False):
        if want is not None:
            local = want.count / (size if isinstance(source, Shard) else 1)
            price += _moved(source, want.becomes(mesh_dim, source), local, size)
    return price


def _moved(source: Placement, target: Placement, count: float, size: int) -> float:
    """Elements that a rank receives when `count` local ones go from `source` to `target` over `size` ranks."""
    if source == target or isinstance(source, Replicate):
        return 0 if not isinstance(target, Partial) or source == target else inf
    if isinstance(target, Partial):
        return inf  # nothing but a pending sum is one; a replicated operand is better used as it is
    others = (size - 1) / size
    if isinstance(source, Partial):
        return MOVING + count * others * (2 if isinstance(target, Replicate) else 1)
    return MOVING + count * others * (size if isinstance(target, Replicate) else 1)
