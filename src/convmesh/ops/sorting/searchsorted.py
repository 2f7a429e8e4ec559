"""Looking values up in sorted rows: each value by itself, in a row that its rank has in full."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from ...sharding.layout import Layout
from ...sharding.registry import Behaviour
from ...sharding.sharding_table import R, Row, Shard
from ...sharding.table_plan import contiguous
from ...sharding.table_rule import table_rule

aten = torch.ops.aten

SEARCH = Behaviour("all dimensions of the values", "nothing; all-gather of sorted rows that are sharded")


@table_rule(aten.searchsorted.Tensor, behaviour=SEARCH, prepare=contiguous)
def searchsorted(ordered: Layout, values: Layout, *_: object) -> Iterator[Row]:
    """Sorted rows, values, sorter -> indices."""
    yield Row("replicated", (R, R, R), (R,))
    for dim in range(values.ndim):
        rows = Shard(dim) if ordered.ndim > 1 and dim < values.ndim - 1 else R
        yield Row("values", (rows, Shard(dim), rows), (Shard(dim),))


@table_rule(aten.bucketize.Tensor, behaviour=SEARCH, prepare=contiguous)
def bucketize(values: Layout, boundaries: Layout, *_: object) -> Iterator[Row]:
    yield Row("replicated", (R, R), (R,))
    for dim in range(values.ndim):
        yield Row("values", (Shard(dim), R), (Shard(dim),))
