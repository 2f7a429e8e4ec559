"""Indexing one dimension with a list of indices: `index_select`, and adding to such indices.

Every rank takes what it owns of the indices, and contributes zeros for the others: along a sharded dimension the
result is Partial(sum). No rank has to know the indices' values in advance, so this compiles, and nothing waits for the
device.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Partial, Placement, Replicate, Shard

from ... import _torch
from ...geometry import Interval
from ...sharding.errors import refuse
from ...sharding.gradient_placements import remember
from ...sharding.layout import Layout
from ...sharding.plan_cache import planned
from ...sharding.redistribute import check_placed, move
from ...sharding.registry import Behaviour, rule
from ...sharding.sharding_table import Assignment, Row, choose, input_placements, output_placements
from .._core.index_bounds import check_within, raised_alike
from .common import idle, replication_price

aten = torch.ops.aten
R, P = Replicate(), Partial()

INDEX = Behaviour("all dimensions, Partial(sum)", "nothing: along the indexed dimension Partial(sum)")
ADD = Behaviour("all dimensions, Partial(sum)", "operands of other placements")


def local_index(index: Any) -> torch.Tensor:
    """A plain tensor of indices is a constant, the same on every rank."""
    if not isinstance(index, DTensor):
        return index  # type: ignore[no-any-return]
    layout = Layout.of(_torch.spec_of(index))
    return move(index, layout.replicated())  # type: ignore[no-any-return]


def owned(index: torch.Tensor, own: Interval, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Where the indices are in the local tensor (anything for those that are not), and which of them are."""
    check_within(index, size)
    mine = (index >= own.start) & (index < own.stop)
    return (index - own.start).clamp(0, max(0, len(own) - 1)), mine


@planned
def plan_index(spec: _torch.Spec, dim: int, count: int) -> tuple[Layout, Layout]:
    layout = Layout.of(spec)
    source = layout.without_partial("sum")
    placements: tuple[Placement, ...] = tuple(P if p == Shard(dim) else p for p in source.placements)
    shape = (*layout.shape[:dim], count, *layout.shape[dim + 1 :])
    return source, layout.new(shape, placements)


@rule(aten.index_select.default, behaviour=INDEX)
def index_select(operator: _torch.Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> DTensor:
    input, dim, index = _torch.arguments(operator, args, kwargs)
    check_placed("index_select", (("input", input),))
    rank = max(1, input.dim())
    if index.dim() > 1 or not -rank <= dim < rank or (input.dim() == 0 and index.numel() != 1):
        named = (("input", input), ("index", index))
        raise refuse("index_select", f"{tuple(index.shape)} indices of dimension {dim}", named,
                     "give a 1-d index, which has one index for a 0-d input")  # fmt: skip
    if input.dim() == 0:
        return aten.view.default(index_select(operator, (aten.unsqueeze.default(input, 0), 0, index), {}), [])  # type: ignore[no-any-return]
    dim, at = dim % input.dim(), local_index(index).reshape(-1)
    source, output = plan_index(_torch.spec_of(input), dim, at.shape[0])
    remember(source.spec)  # its gradient is written into zeros
    x = move(input, source)
    if not source.present:
        return output.absent(x)
    if not x.numel():
        check_within(at, source.shape[dim])
    if dim not in source.sharded_dims:
        taken = raised_alike(lambda: aten.index_select.default(x, dim, at).contiguous(), at, source.shape[dim])
        return _torch.wrap(taken, output.spec)
    places, mine = owned(at, source.own(dim), source.shape[dim])
    if not x.shape[dim]:
        return _torch.wrap(x.new_zeros(output.local_shape), output.spec)
    others = (~mine).view(-1, *[1] * (x.dim() - dim - 1))
    return _torch.wrap(x.index_select(dim, places).masked_fill(others, 0), output.spec)


@planned
def plan_add(
    operator: str, full_spec: _torch.Spec, source_spec: _torch.Spec, beside: tuple[int | None, ...], adds: bool = True
) -> tuple[Layout, Layout, Layout]:
    """`beside` has for each dimension of the full that of the source; None for one that is indexed."""
    full, source = Layout.of(full_spec), Layout.of(source_spec)
    rows = [Row("replicated", (R, R), (R,)), *([Row("sums", (P, P), (P,))] if adds else [])]
    # Along an indexed dimension each rank adds to what it owns.
    rows += [Row("sharded", (Shard(d), R if b is None else Shard(b)), (Shard(d),)) for d, b in enumerate(beside)]

    def fits(assignment: Assignment) -> bool:
        placed = enumerate((full, source))
        return not any(idle(layout, input_placements(assignment, number)) for number, layout in placed)

    chosen = choose(operator, rows, (("input", full), ("source", source)), fits=fits,
                    extra=lambda row, mesh_dim: replication_price(row, mesh_dim, (full, source)))  # fmt: skip
    placed = full.placed(input_placements(chosen, 0)), source.placed(input_placements(chosen, 1))
    return *placed, full.new(full.shape, output_placements(chosen, 0))


@rule(aten.index_add.default, behaviour=ADD)
def index_add(operator: _torch.Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> DTensor:
    full, dim, index, source, alpha = _torch.arguments(operator, args, kwargs)
    check_placed("index_add", (("input", full), ("source", source)))
    dim, at = dim % max(1, full.dim()), local_index(index).reshape(-1)
    beside = tuple(None if other == dim else other for other in range(full.dim()))
    placed, given, output = plan_add("index_add", _torch.spec_of(full), _torch.spec_of(source), beside)
    x, values = move(full, placed), move(source, given)
    if not output.present:
        return output.absent(x)
    if dim in output.sharded_dims:
        at, mine = owned(at, output.own(dim), output.shape[dim])
        values = values.masked_fill((~mine).view(-1, *[1] * (x.dim() - dim - 1)), 0)
    elif not x.numel():
        check_within(at, output.shape[dim] if output.shape else 1)
    if not x.numel():
        return _torch.wrap(x.clone(), output.spec)
    size = output.shape[dim] if output.shape else 1
    result = raised_alike(lambda: aten.index_add.default(x, dim, at, values, alpha=alpha), at, size)
    return _torch.wrap(result.contiguous(), output.spec)
