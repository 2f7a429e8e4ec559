"""Writing with tensors of indices: `x[indices] = values`, and the gradient of indexing, which adds.

Every rank writes what it owns of the indexed dimensions.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from ... import _torch
from ...sharding.implicit_replication import as_replicated
from ...sharding.layout import Layout
from ...sharding.plan_cache import planned
from ...sharding.redistribute import check_placed, move, redistribute_local
from ...sharding.registry import rule
from .index import Indices, MovedDims, check_indices, indices_by_dim, local_indices, move_dims, sole_mask, zero_unowned
from .index_select import ADD, plan_add
from .masked_select import put_masked

aten = torch.ops.aten


@rule(aten.index_put.default, aten.index_put_.default, aten._index_put_impl_.default, behaviour=ADD)
def index_put(operator: _torch.Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`x[indices] = values`, or `+=`. Not a `plan_rule`, for the same reason as `index`."""
    full, indices, values, adds, *_ = _torch.arguments(operator, args, kwargs)
    if not isinstance(full, DTensor):
        return _torch.stock(operator, args, kwargs)
    if isinstance(values, torch.Tensor) and not isinstance(values, DTensor) and values.numel() == 1:
        values = as_replicated(values, full.device_mesh)
    check_placed("index_put", (("input", full), ("values", values)))
    mask = sole_mask(full, indices)
    if mask is not None and values.numel() == 1 and not adds:
        return _fill_masked(operator, full, mask, values)
    if mask is not None and not _torch.tracing():
        return _store_result(operator, full, *put_masked(full, mask, _one_row_each(full, mask, values), adds))
    by_dim = indices_by_dim(full.shape, indices)
    moved = move_dims(tuple(full.shape), tuple(by_dim), tuple(next(iter(by_dim.values())).shape))
    if moved.shape != tuple(values.shape):
        values = aten.expand.default(values, list(moved.shape))
    return _store_result(operator, full, *_put(full, by_dim, moved, values, adds))


@planned
def _plan(
    full: _torch.Spec, values: _torch.Spec, beside: tuple[int | None, ...], adds: bool
) -> tuple[Layout, Layout, Layout]:
    """Cached `plan_add` for specs."""
    return plan_add("index_put", Layout.of(full), Layout.of(values), beside, adds)


def _put(full: DTensor, by_dim: Indices, moved: MovedDims, values: DTensor, adds: bool) -> tuple[torch.Tensor, Layout]:
    """Return the local tensor of the result, and its layout."""
    beside = tuple(moved.kept.get(dim) for dim in range(full.dim()))
    placed, values_layout, output = _plan(_torch.spec_of(full), _torch.spec_of(values), beside, adds)
    x, v = move(full, placed), move(values, values_layout)
    if not output.present:
        return x.clone(), output
    if not x.numel():
        check_indices(by_dim, output)
        return x.clone(), output
    local, mine = local_indices(by_dim, output)
    if adds or mine is None:
        return aten.index_put.default(x, local, zero_unowned(v, mine, moved.first), adds), output
    return _write_owned(x, local, mine, v, moved, output), output


def _write_owned(
    x: torch.Tensor, local: Sequence[torch.Tensor | None], mine: torch.Tensor, v: torch.Tensor, moved: MovedDims,
    output: Layout,
) -> torch.Tensor:  # fmt: skip
    """Write the values whose index this rank owns; the others go to an extra index, which is removed afterwards."""
    dim = next(d for d, index in enumerate(local) if index is not None and d in output.sharded_dims)
    length = x.shape[dim]
    padded = torch.cat([x, x.narrow(dim, 0, 1)], dim)
    places = [
        torch.where(mine, index, length) if d == dim and index is not None else index for d, index in enumerate(local)
    ]
    written: torch.Tensor = aten.index_put.default(padded, places, v)
    return written.narrow(dim, 0, length)


def _fill_masked(operator: _torch.Operator, full: DTensor, mask: DTensor, value: DTensor) -> Any:
    """Write one value wherever the mask is true: elementwise."""
    behind = full.dim() - mask.dim()
    for _ in range(behind):
        mask = aten.unsqueeze.default(mask, -1)
    value = aten.view.default(value, [])
    if operator._schema.is_mutable:
        return aten.masked_fill_.Tensor(full, mask, value)
    return aten.masked_fill.Tensor(full, mask, value)


def _one_row_each(full: DTensor, mask: DTensor, values: DTensor) -> DTensor:
    """Expand values that are broadcast over the selection to one row for each selected row."""
    if values.dim() == full.dim() - mask.dim() + 1 and values.shape[0] != 1:
        return values
    count = int(aten.sum.default(mask).full_tensor())
    return aten.expand.default(values, [count, *full.shape[mask.dim() :]])  # type: ignore[no-any-return]


def _store_result(operator: _torch.Operator, full: DTensor, local: torch.Tensor, layout: Layout) -> DTensor:
    """Return the result: a new tensor, or `full` itself for the in-place operator."""
    if not operator._schema.is_mutable:
        return _torch.wrap(local.contiguous(), layout.dense.spec)
    target = Layout.of(_torch.spec_of(full))
    _torch.local_of(full).copy_(redistribute_local(local, layout, target))
    return full
