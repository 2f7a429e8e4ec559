"""Triangles of sharded matrices: each rank shifts the diagonal by the start of its rows and columns."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from ...sharding.layout import Layout
from ...sharding.registry import Behaviour
from ...sharding.sharding_table import P, R, Row, Shard
from ...sharding.table_plan import TablePlan
from ...sharding.table_rule import table_rule

aten = torch.ops.aten

TRIANGLE = Behaviour("all dimensions, Partial(sum)", "nothing", "tensors with fewer than 2 dimensions")


def _own_triangle(plan: TablePlan, input: Layout, diagonal: int) -> Callable[..., torch.Tensor]:
    below = input.own(input.ndim - 2).start - input.own(input.ndim - 1).start
    return lambda local, diagonal: plan.operator(local, diagonal + below)


@table_rule(aten.tril.default, aten.triu.default, behaviour=TRIANGLE, local=_own_triangle)
def triangle(input: Layout, diagonal: int) -> Iterator[Row]:
    yield Row("replicated", (R,), (R,))
    yield Row("sum", (P,), (P,))
    for dim in range(input.ndim):
        yield Row("sharded", (Shard(dim),), (Shard(dim),))
