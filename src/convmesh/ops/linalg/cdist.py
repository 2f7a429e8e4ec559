"""Distances between all pairs of rows of two tensors: `[B* P M] [B* R M] -> [B* P R]`."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from ...sharding.layout import Layout
from ...sharding.registry import Behaviour
from ...sharding.sharding_table import P, R, Row, Shard
from ...sharding.table_plan import contiguous
from ...sharding.table_rule import table_rule

aten = torch.ops.aten

DISTANCE = Behaviour("batch, the rows of one of the two", "the smaller is replicated where rows of both are sharded")


def _batch(*operands: Layout) -> Iterator[Row]:
    """Rows that replicate everything, or shard a batch dimension that all operands have in full."""
    yield Row("replicated", (R,) * len(operands), (R,))
    for dim in range(-min(layout.ndim for layout in operands), -2):
        if len({layout.shape[dim] for layout in operands}) == 1:
            yield Row("batch", (Shard(dim),) * len(operands), (Shard(dim),))


@table_rule(aten._cdist_forward.default, behaviour=DISTANCE, prepare=contiguous)
def cdist(x1: Layout, x2: Layout, p: float, compute_mode: int | None) -> Iterator[Row]:
    yield from _batch(x1, x2)
    yield Row("rows", (Shard(-2), R), (Shard(-2),))
    yield Row("columns", (R, Shard(-2)), (Shard(-1),))


@table_rule(aten._cdist_backward.default, behaviour=DISTANCE, prepare=contiguous)
def cdist_backward(grad: Layout, x1: Layout, x2: Layout, p: float, distances: Layout) -> Iterator[Row]:
    """Return the gradient of x1."""
    yield from _batch(grad, x1, x2, distances)
    yield Row("rows", (Shard(-2), Shard(-2), R, Shard(-2)), (Shard(-2),))
    yield Row("columns", (Shard(-1), R, Shard(-2), Shard(-1)), (P,))
