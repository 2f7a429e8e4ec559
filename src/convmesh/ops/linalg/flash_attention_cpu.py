"""torch's fused attention for CPUs, and its gradient: each rank runs it for the queries that it has."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod

import torch

from ...sharding.errors import Unfit
from ...sharding.layout import Layout
from ...sharding.registry import Behaviour
from ...sharding.sharding_table import P, R, Row, Shard
from ...sharding.table_rule import table_rule

aten = torch.ops.aten
BATCH, HEADS, TOKENS = Shard(0), Shard(1), Shard(2)

KERNEL = Behaviour(
    "batch, heads, tokens of the queries", "keys and values whose tokens are sharded",
    "dropout, masks and causal attention over sharded tokens",
)  # fmt: skip


def _innermost(layout: Layout, local: torch.Tensor) -> torch.Tensor:
    """The kernel takes the numbers of a token for neighbours in memory, and does not look whether they are."""
    return local if local.stride(-1) == 1 else local.contiguous()


def _check(query: Layout, key: Layout, value: Layout, dropout: float, causal: bool, mask: Layout | None) -> None:
    if query.ndim != 4 or key.shape != value.shape or prod(key.shape) == 0:
        raise Unfit("needs 4 dimensions, and keys and values of one shape",
                    "call scaled_dot_product_attention, which takes others too")  # fmt: skip
    if dropout or mask is not None or (causal and any(2 in layout.sharded_dims for layout in (query, key, value))):
        raise Unfit("dropout, a mask, or causal attention over sharded tokens", "call scaled_dot_product_attention")


@table_rule(aten._scaled_dot_product_flash_attention_for_cpu.default, behaviour=KERNEL, prepare=_innermost)
def flash_attention(
    query: Layout, key: Layout, value: Layout, dropout_p: float, is_causal: bool, attn_mask: Layout | None, *_: object
) -> Iterator[Row]:
    """query, key, value, mask -> output, logsumexp"""
    _check(query, key, value, dropout_p, is_causal, attn_mask)
    yield Row("replicated", (R, R, R, R), (R, R))
    for sharded in (BATCH, HEADS):
        yield Row("heads", (sharded, sharded, sharded, R), (sharded, sharded))
    if not is_causal:
        yield Row("queries", (TOKENS, R, R, R), (TOKENS, TOKENS))


@table_rule(aten._scaled_dot_product_flash_attention_for_cpu_backward.default, behaviour=KERNEL, prepare=_innermost)
def flash_attention_backward(
    grad_out: Layout, query: Layout, key: Layout, value: Layout, out: Layout, logsumexp: Layout, dropout_p: float,
    is_causal: bool, attn_mask: Layout | None, *_: object,
) -> Iterator[Row]:  # fmt: skip
    """... -> gradients of query, key, value"""
    _check(query, key, value, dropout_p, is_causal, attn_mask)
    yield Row("replicated", (R,) * 7, (R,) * 3)
    for sharded in (BATCH, HEADS):
        yield Row("heads", (*(sharded,) * 6, R), (sharded,) * 3)
    if not is_causal:
        yield Row("queries", (TOKENS, TOKENS, R, R, TOKENS, TOKENS, R), (TOKENS, P, P))
