"""Joining DTensors: cat, stack, and writing a part into a full tensor.

The operands are redistributed to one layout at least cost. Along the dimension in which they are joined, each rank
fetches what its shard of the result copies from the ranks that own it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement

from ... import _torch
from ...geometry import IndexMap, index_map
from ...sharding.call import Call
from ...sharding.errors import Unfit
from ...sharding.implicit_replication import as_replicated
from ...sharding.layout import Layout
from ...sharding.plan_rule import plan_rule
from ...sharding.registry import Behaviour
from ...sharding.sharding_table import P, R, Row, Shard, choose, input_placements, output_placements
from .._core.index_copy import DistributedCopy
from .slice_split import bounds

aten = torch.ops.aten

JOIN = Behaviour("all dimensions, Partial(sum)", "elements that change owner; operands with other placements")
PUT = Behaviour("all dimensions, Partial(sum)", "elements that change owner; a part with other placements")


def _placed(tensors: Sequence[Any]) -> list[Any]:
    """Make plain tensors replicated DTensors in backward: autograd makes plain zeros for parts without a gradient."""
    mesh = next((tensor.device_mesh for tensor in tensors if isinstance(tensor, DTensor)), None)
    if mesh is None or not _torch.in_backward():
        return list(tensors)
    return [tensor if isinstance(tensor, DTensor) else as_replicated(tensor, mesh) for tensor in tensors]


def _list_placed(tensors: Sequence[Any], dim: int) -> tuple[Any, ...]:
    return _placed(tensors), dim


def _pair_placed(full: Any, part: Any, *where: Any) -> tuple[Any, ...]:
    return *_placed((full, part)), *where


def _rows(operands: Sequence[Layout], shift: Callable[[int], int] = lambda dim: dim) -> list[Row]:
    """Return every way to place all operands alike; `shift` maps a dimension of the operands to that of the result."""
    many = len(operands)
    shards = [Row("sharded", (Shard(d),) * many, (Shard(shift(d)),)) for d in range(operands[0].ndim)]
    return [Row("replicated", (R,) * many, (R,)), *shards, Row("Partial(sum)s", (P,) * many, (P,))]


def _join(
    operator: _torch.Operator, operands: Sequence[Layout], rows: Sequence[Row], shape: tuple[int, ...],
    dtype: torch.dtype, along: tuple[int, IndexMap] | None = None,
) -> tuple[list[Layout], Layout, DistributedCopy | None]:  # fmt: skip
    """Return the layouts of the operands, that of the result, and the copies along a sharded joined dimension.

    `along` is the joined dimension and its index map. The copies are None where that dimension is not sharded.
    """
    chosen = choose(
        _torch.name_of(operator), rows, [(f"tensor {number}", layout) for number, layout in enumerate(operands)]
    )
    placed = [layout.placed(input_placements(chosen, number)) for number, layout in enumerate(operands)]
    output = operands[0].new(shape, output_placements(chosen, 0), dtype)
    remap = None
    if output.present and along is not None and output.sharded_over(along[:1]):
        dim, joined = along
        remap = DistributedCopy.of(output, {dim: joined}, [layout.shape[dim] for layout in placed])
    return placed, output, remap


def _common_dtype(tensors: Sequence[Layout]) -> torch.dtype:
    dtype = tensors[0].dtype
    for tensor in tensors[1:]:
        dtype = torch.promote_types(dtype, tensor.dtype)
    return dtype


@plan_rule(aten.cat.default, behaviour=JOIN, completes=_list_placed)
def cat(operator: _torch.Operator, tensors: Sequence[Layout], dim: int) -> Call:
    # torch.cat accepts tensors of shape (0,) beside tensors of any other shape.
    operands = [layout for layout in tensors if layout.shape != (0,)] or list(tensors[:1])
    first = operands[0].shape
    dim %= len(first)
    if any((*o.shape[:dim], *o.shape[dim + 1 :]) != (*first[:dim], *first[dim + 1 :]) for o in operands):
        raise Unfit(f"the shapes differ beside dimension {dim}", "give shapes that are equal otherwise")
    sizes = [operand.shape[dim] for operand in operands]
    shape = (*first[:dim], sum(sizes), *first[dim + 1 :])
    rows = _rows(operands)
    if _torch.has_symbols(sizes):  # a compiler does not know which rank owns what after the first operand
        rows = [row for row in rows if row.outputs[0] != Shard(dim)]
    dtype = _common_dtype(tensors)
    placed, output, remap = _join(operator, operands, rows, shape, dtype, (dim, index_map.joined(sizes)))

    def plainly(tensors: list[torch.Tensor], _: int) -> torch.Tensor:
        return torch.cat(tensors, dim)

    def run(tensors: Sequence[torch.Tensor | None], _: int) -> torch.Tensor:
        local = [one if one.dtype == dtype else one.to(dtype) for one in tensors if one is not None]
        return torch.cat(local, dim) if remap is None else remap(local)

    used = iter(placed)
    joined: list[Layout | None] = [next(used) if any(layout is one for one in operands) else None for layout in tensors]
    plain = remap is None and None not in joined and all(layout.dtype == dtype for layout in tensors)
    return Call((joined,), output, plainly if plain else run)


@plan_rule(aten.stack.default, behaviour=JOIN, completes=_list_placed)
def stack(operator: _torch.Operator, tensors: Sequence[Layout], dim: int) -> Call:
    first = tensors[0].shape
    if any(operand.shape != first for operand in tensors) or not -len(first) - 1 <= dim <= len(first):
        raise Unfit("the shapes differ, or there is no such dimension", "give tensors of one shape")
    dim %= len(first) + 1
    shape, dtype = (*first[:dim], len(tensors), *first[dim:]), _common_dtype(tensors)
    placed, output, _ = _join(operator, tensors, _rows(tensors, lambda d: d + (d >= dim)), shape, dtype)
    return Call((placed,), output, lambda local, _: torch.stack([one.to(dtype) for one in local], dim))


@plan_rule(aten.slice_scatter.default, behaviour=PUT, completes=_pair_placed)
def slice_scatter(
    operator: _torch.Operator, full: Layout, part: Layout, dim: int, start: int | None, stop: int | None, step: int
) -> Call:
    dim %= max(1, full.ndim)
    count, first = bounds(full.shape[dim], start, stop, step)
    if part.shape != (*full.shape[:dim], count, *full.shape[dim + 1 :]):
        raise Unfit(f"replaces {count} of dimension {dim}", "give a part of the slice's shape")
    scattered = index_map.slice_scatter(full.shape[dim], count, first, step)
    pair = (full, part)
    placed, output, remap = _join(operator, pair, _rows(pair), full.shape, full.dtype, (dim, scattered))

    def run(x: torch.Tensor, part: torch.Tensor, *where: Any) -> torch.Tensor:
        if remap is not None:
            return remap([x, part.to(x.dtype)])
        result: torch.Tensor = operator(x, part.to(x.dtype), *where)
        return result

    return Call(placed, output, run)


@plan_rule(aten.select_scatter.default, behaviour=PUT, completes=_pair_placed)
def select_scatter(operator: _torch.Operator, full: Layout, part: Layout, dim: int, index: int) -> Call:
    dim, size = dim % max(1, full.ndim), full.shape[dim]
    if part.shape != (*full.shape[:dim], *full.shape[dim + 1 :]) or not -size <= index < size:
        raise Unfit(f"replaces index {index} of dimension {dim}", "give a part of the selected shape")
    # The dimension that only the full tensor has may be sharded, too: then only the owner of the index writes the part.
    rows = [Row("replicated", (R, R), (R,)), Row("Partial(sum)s", (P, P), (P,))]
    for d in range(full.ndim):
        beside: Placement = R if d == dim else Shard(d - (d > dim))
        rows.append(Row("sharded", (Shard(d), beside), (Shard(d),)))
    placed, output, _ = _join(operator, (full, part), rows, full.shape, full.dtype)
    own, at = output.own(dim) if output.present else range(0), index % size

    def run(x: torch.Tensor, part: torch.Tensor, *_: Any) -> torch.Tensor:
        if at not in own:
            return x.clone()
        return torch.select_scatter(x, part.to(x.dtype), dim, at - own.start)

    return Call(placed, output, run)
