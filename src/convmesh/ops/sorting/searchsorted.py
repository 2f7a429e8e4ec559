"""Looking values up in sorted rows: each value by itself, in a row that its rank has all of."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Replicate, Shard

from ... import _torch
from ...sharding.layout import Layout, dense_stride
from ...sharding.plan_cache import planned
from ...sharding.redistribute import layouts_of, move, specs_of
from ...sharding.registry import Behaviour, rule
from ...sharding.sharding_table import Row, choose, input_placements, output_placements

aten = torch.ops.aten
R = Replicate()

SEARCH = Behaviour("all dimensions of the values", "nothing; sorted rows that are cut, to all")


@rule(aten.searchsorted.Tensor, behaviour=SEARCH)
def searchsorted(operator: _torch.Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> DTensor:
    ordered, values, narrow, right, side, sorter = _torch.arguments(operator, args, kwargs)
    return _searched(ordered, values, sorter, {"out_int32": narrow, "right": right, "side": side})


@rule(aten.bucketize.Tensor, behaviour=SEARCH)
def bucketize(operator: _torch.Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> DTensor:
    values, boundaries, narrow, right = _torch.arguments(operator, args, kwargs)
    return _searched(boundaries, values, None, {"out_int32": narrow, "right": right})


def _searched(ordered: Any, values: Any, sorter: Any, options: dict[str, Any]) -> DTensor:
    specs = specs_of("searchsorted", (("sorted sequence", ordered), ("values", values), ("sorter", sorter)))
    operands, output = _plan(torch.int32 if options["out_int32"] else torch.int64, *specs)
    rows, x, order = (move(tensor, at) for tensor, at in zip((ordered, values, sorter), operands, strict=True))
    if output.mesh.get_coordinate() is None:
        return _torch.wrap(x.new_empty(0, dtype=output.dtype), output.spec)
    found = aten.searchsorted.Tensor(rows.contiguous(), x.contiguous(), sorter=order, **options)
    return _torch.wrap(found, output.spec)


@planned
def _plan(dtype: torch.dtype, *specs: _torch.Spec | None) -> tuple[tuple[Layout | None, ...], Layout]:
    names = ("sorted sequence", "values", "sorter")
    ordered, values, sorter = layouts_of("searchsorted", list(zip(names, specs, strict=True)))
    rank, deep = len(values.shape), len(ordered.shape) > 1
    rows = [Row("replicated", (R, R, R), (R,))]
    for dim in range(rank):
        beside = Shard(dim) if deep and dim < rank - 1 else R
        rows.append(Row(f"dimension {dim}", (beside, Shard(dim), beside), (Shard(dim),)))
    chosen = choose("searchsorted", rows, list(zip(names, (ordered, values, sorter), strict=True)))
    operands = tuple(
        None if layout is None else layout.placed(input_placements(chosen, number))
        for number, layout in enumerate((ordered, values, sorter))
    )
    stride = dense_stride(values.shape, torch.contiguous_format)
    return operands, Layout(values.mesh, output_placements(chosen, 0), values.shape, stride, dtype)
