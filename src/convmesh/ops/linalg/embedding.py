"""Embedding: rows of a weight by their indices, `[V E] [...] -> [... E]`.

DTensor's own rule keeps its mask from one call to the next, and accepts DTensors only, also in backward; a model that
creates its positions in its forward pass uses plain tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from ...sharding.layout import Layout
from ...sharding.registry import Behaviour
from ...sharding.sharding_table import P, R, Row, Shard
from ...sharding.table_plan import TablePlan
from ...sharding.table_rule import table_rule
from .._core.index_bounds import check_bounds, raise_on_all_ranks
from ..indexing.index_select import owned

aten = torch.ops.aten

EMBEDDING = Behaviour(
    "all dimensions of indices and weight; the result is Partial(sum) where rows of the weight are sharded",
    "nothing; on CPUs an all-reduce of one value, which says whether any of the sharded indices is bad",
    "sparse gradients",
)  # fmt: skip


def _local_lookup(plan: TablePlan, weight: Layout, indices: Layout, *_: object) -> Callable[..., torch.Tensor]:
    """Look up the local rows; zeros for indices that other ranks own. A bad index raises on all ranks."""
    count = weight.shape[0]

    def rows(local: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        if not local.numel():
            check_bounds(at, count)
        if 0 not in weight.sharded_dims:
            found: torch.Tensor = aten.embedding.default(local, at)
            return found
        places, mine = owned(at, weight.own(0), count)
        if not local.shape[0]:
            return local.new_zeros((*at.shape, local.shape[1]))
        found = aten.embedding.default(local, places)
        return found.masked_fill(~mine.unsqueeze(-1), 0)

    return lambda local, at, *_: raise_on_all_ranks(lambda: rows(local, at), at, count, indices)


@table_rule(aten.embedding.default, behaviour=EMBEDDING, local=_local_lookup, communicates=True)
def embedding(weight: Layout, indices: Layout, *_: object) -> Iterator[Row]:
    yield Row("replicated", (R, R), (R,))
    yield Row("columns", (Shard(1), R), (Shard(-1),))
    yield Row("rows", (Shard(0), R), (P,))
    for dim in range(indices.ndim):
        yield Row("indices", (R, Shard(dim)), (Shard(dim),))


@table_rule(aten.embedding_dense_backward.default, behaviour=EMBEDDING)
def embedding_dense_backward(
    grad_output: Layout, indices: Layout, num_weights: int, padding_idx: int, scale_grad_by_freq: bool
) -> Iterator[Row]:
    yield Row("replicated", (R, R), (R,))
    yield Row("columns", (Shard(-1), R), (Shard(1),))
    yield Row("sum", (P, R), (P,))
    if not scale_grad_by_freq:  # counting how often an index occurs needs all indices
        for dim in range(indices.ndim):
            yield Row("indices", (Shard(dim), Shard(dim)), (P,))
