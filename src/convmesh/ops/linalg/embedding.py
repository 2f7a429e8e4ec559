"""Rows of a table by their numbers: [V E] [...] -> [... E]

DTensor's own rule remembers what was masked from one call to the next, and wants DTensors only, also in backward; a
model that makes its positions in its forward pass has plain ones.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Partial, Replicate, Shard

from ... import _torch
from ...sharding.layout import Layout, dense_stride
from ...sharding.plan_cache import planned
from ...sharding.redistribute import layouts_of, move, specs_of
from ...sharding.registry import Behaviour, rule
from ...sharding.sharding_table import Row, choose, input_placements, output_placements
from .._core.index_bounds import check_within, raised_alike
from ..indexing.index_select import owned

aten = torch.ops.aten
R, P = Replicate(), Partial()

EMBEDDING = Behaviour(
    "all dimensions of the indices, both of the table",
    "nothing: of a table cut by rows a pending sum; on CPUs one number, for bad indices, where these are cut",
    "sparse gradients",
)  # fmt: skip

Plan = tuple[Layout, Layout, Layout]


@rule(aten.embedding.default, behaviour=EMBEDDING)
def embedding(operator: _torch.Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> DTensor:
    table, indices, *_ = _torch.arguments(operator, args, kwargs)
    specs = specs_of("embedding", (("table", table), ("indices", indices)))
    placed, at, output = _plan(*specs)
    rows, chosen = move(table, placed), move(indices, at)
    if output.mesh.get_coordinate() is None:
        return _torch.wrap(rows.new_empty(0), output.spec)
    found = raised_alike(lambda: _rows(rows, chosen, placed), chosen, placed.shape[0], at)
    return _torch.wrap(found, output.spec)


def _rows(table: torch.Tensor, indices: torch.Tensor, placed: Layout) -> torch.Tensor:
    """Of this rank's part of the table; zeros for the others."""
    if not table.numel():
        check_within(indices, placed.shape[0])
    if 0 not in placed.cuts:
        result: torch.Tensor = aten.embedding.default(table, indices)
        return result
    places, mine = owned(indices, placed.own(0), placed.shape[0])
    if not table.shape[0]:
        return table.new_zeros((*indices.shape, table.shape[1]))
    return aten.embedding.default(table, places).masked_fill(~mine.unsqueeze(-1), 0)  # type: ignore[no-any-return]


@planned
def _plan(table_spec: _torch.Spec, index_spec: _torch.Spec) -> Plan:
    table, indices = layouts_of("embedding", [("table", table_spec), ("indices", index_spec)])
    last = len(indices.shape)
    rows = [
        Row("replicated", (R, R), (R,)),
        Row("columns", (Shard(1), R), (Shard(last),)),
        Row("rows", (Shard(0), R), (P,)),
    ]
    rows += [Row(f"indices {dim}", (R, Shard(dim)), (Shard(dim),)) for dim in range(last)]
    chosen = choose("embedding", rows, [("table", table), ("indices", indices)])
    shape = (*indices.shape, table.shape[1])
    stride = dense_stride(shape, torch.contiguous_format)
    output = Layout(table.mesh, output_placements(chosen, 0), shape, stride, table.dtype)
    return table.placed(input_placements(chosen, 0)), indices.placed(input_placements(chosen, 1)), output


@rule(aten.embedding_dense_backward.default, behaviour=EMBEDDING)
def embedding_dense_backward(operator: _torch.Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> DTensor:
    gradient, indices, count, padding, by_frequency = _torch.arguments(operator, args, kwargs)
    specs = specs_of("embedding_dense_backward", (("grad_output", gradient), ("indices", indices)))
    placed, at, output = _plan_backward(int(count), by_frequency, *specs)
    given, chosen = move(gradient, placed), move(indices, at)
    if output.mesh.get_coordinate() is None:
        return _torch.wrap(given.new_empty(0), output.spec)
    return _torch.wrap(operator(given, chosen, count, padding, by_frequency), output.spec)


@planned
def _plan_backward(count: int, by_frequency: bool, gradient_spec: _torch.Spec, index_spec: _torch.Spec) -> Plan:
    """How often an index is there only those know that have all of them."""
    named = [("grad_output", gradient_spec), ("indices", index_spec)]
    gradient, indices = layouts_of("embedding_dense_backward", named)
    last = len(indices.shape)
    rows = [
        Row("replicated", (R, R), (R,)),
        Row("columns", (Shard(last), R), (Shard(1),)),
        Row("pending", (P, R), (P,)),
    ]
    if not by_frequency:
        rows += [Row(f"indices {dim}", (Shard(dim), Shard(dim)), (P,)) for dim in range(last)]
    chosen = choose("embedding_dense_backward", rows, [("grad_output", gradient), ("indices", indices)])
    shape = (count, gradient.shape[-1])
    stride = dense_stride(shape, torch.contiguous_format)
    output = Layout(gradient.mesh, output_placements(chosen, 0), shape, stride, gradient.dtype)
    return gradient.placed(input_placements(chosen, 0)), indices.placed(input_placements(chosen, 1)), output
