"""Sharding tables: rows of placements along one mesh dimension, and the choice of rows with the least communication."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from math import inf, prod

import torch
from torch.distributed.tensor.placement_types import Partial, Placement, Replicate
from torch.distributed.tensor.placement_types import Shard as Shard

from .errors import Unfit, refuse
from .layout import Layout

# The placements that tables use besides Shard.
R, P = Replicate(), Partial()


@dataclass(frozen=True)
class Row:
    """One way to run an operator along one mesh dimension: the placements of its inputs and outputs."""

    name: str
    inputs: tuple[Placement, ...]
    outputs: tuple[Placement, ...]


def elementwise_rows(operands: Sequence[Layout | None], results: int = 1) -> Iterator[Row]:
    """Yield the rows of an operator on tensors that are broadcast against each other.

    For each dimension, the operands that have it in full size are sharded along it, and the results with them.
    """
    given = [layout for layout in operands if layout is not None]
    try:
        full = given[0].new(torch.broadcast_shapes(*(layout.shape for layout in given)))
    except RuntimeError:
        raise Unfit("the shapes cannot be broadcast against each other", "give tensors of one shape") from None
    yield Row("replicated", (R,) * len(operands), (R,) * results)
    for dim in range(full.ndim):
        placements = tuple(R if layout is None else layout.beside(full, dim) for layout in operands)
        yield Row("elementwise", placements, (Shard(dim),) * results)


def counted_from_start(row: Row, inputs: Sequence[int | None], outputs: Sequence[int | None]) -> Row:
    """Return the row with non-negative dimensions, given the numbers of dimensions of inputs and outputs.

    An output that does not have the sharded dimension is replicated: it is a buffer that the kernel leaves empty.
    """

    def counted(placement: Placement, ndim: int | None) -> Placement:
        if not isinstance(placement, Shard) or ndim is None or 0 <= placement.dim < ndim:
            return placement
        return Shard(placement.dim + ndim) if placement.dim < 0 else R

    return Row(row.name, tuple(map(counted, row.inputs, inputs)), tuple(map(counted, row.outputs, outputs)))


# Redistributing along a mesh dimension of one rank sends nothing, but no move is still better: the tensor dimension may
# be sharded over other mesh dimensions too, and torch then redistributes along all of them.
MOVING = 1e-6

Assignment = tuple[Row, ...]
"""A row for each mesh dimension."""


def input_placements(assignment: Assignment, number: int) -> tuple[Placement, ...]:
    return tuple(row.inputs[number] for row in assignment)


def output_placements(assignment: Assignment, number: int) -> tuple[Placement, ...]:
    return tuple(row.outputs[number] for row in assignment)


@dataclass(frozen=True)
class Wanted:
    """A wish that an output of `count` elements has the placements `like`; a replicated one may stay Partial(sum).

    With `or_sharded` it may stay sharded too, and is not all-gathered.
    """

    like: tuple[Placement, ...]
    count: int
    or_sharded: bool = False

    def becomes(self, mesh_dim: int, placement: Placement) -> Placement:
        """Return the final placement of an output that a row leaves with `placement`."""
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
    """Return the assignment that communicates the fewest elements and that `fits`; earlier rows win ties.

    `extra(row, mesh_dim)` is an additional cost in elements.
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
    yield first  # the usual case, which needs no sorting
    every = sorted((sum(price for price, _ in entries), tuple(n for _, n in entries)) for entries in product(*possible))
    yield from (numbers for _, numbers in every)


def _price(
    row: Row, mesh_dim: int, size: int, inputs: Sequence[Layout | None], wanted: Sequence[Wanted | None]
) -> float:
    """Return the number of elements that a rank receives along a mesh dimension of `size` ranks with this row."""
    price = 0.0
    for layout, target in zip(inputs, row.inputs, strict=True):
        if layout is not None:
            local = prod(layout.shape) / prod(
                layout.mesh.size(m) for dims in layout.sharded_dims.values() for m in dims
            )
            price += _moved(layout.placements[mesh_dim], target, local, size)
    for want, source in zip(wanted, row.outputs, strict=False):
        if want is not None:
            local = want.count / (size if isinstance(source, Shard) else 1)
            price += _moved(source, want.becomes(mesh_dim, source), local, size)
    return price


def _moved(source: Placement, target: Placement, count: float, size: int) -> float:
    """Return the number of elements received when `count` local ones go from `source` to `target` over `size` ranks."""
    if source == target or isinstance(source, Replicate):
        return 0 if not isinstance(target, Partial) or source == target else inf
    if isinstance(target, Partial):
        return inf  # only Partial becomes Partial; a replicated operand is better used directly
    others = (size - 1) / size
    if isinstance(source, Partial):
        return MOVING + count * others * (2 if isinstance(target, Replicate) else 1)
    return MOVING + count * others * (size if isinstance(target, Replicate) else 1)
