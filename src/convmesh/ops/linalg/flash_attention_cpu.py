"""torch's fused attention for CPUs, and its gradient: each rank runs it for the queries that it has."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Partial, Replicate, Shard

from ... import _torch
from ...sharding.errors import refuse
from ...sharding.layout import Layout
from ...sharding.plan_cache import planned
from ...sharding.redistribute import check_placed, move
from ...sharding.registry import Behaviour, rule
from ...sharding.sharding_table import Row, choose, input_placements, output_placements
from ..normalization.common import new
from ..reductions.plan import absent, wide, wrap_dense

aten = torch.ops.aten
R, P = Replicate(), Partial()
BATCH, HEADS, TOKENS = Shard(0), Shard(1), Shard(2)

KERNEL = Behaviour(
    "batch, heads, tokens of the queries", "keys and values that are cut along tokens",
    "dropout, masks and causal attention over sharded tokens",
)  # fmt: skip
# query, key, value -> output, logsumexp
FORWARD = [
    Row("replicated", (R,) * 3, (R,) * 2),
    *[Row("whole heads", (cut,) * 3, (cut,) * 2) for cut in (BATCH, HEADS)],
    Row("some queries", (TOKENS, R, R), (TOKENS,) * 2),
]
# gradient, query, key, value, output, logsumexp -> gradients of query, key, value
BACKWARD = [
    Row("replicated", (R,) * 6, (R,) * 3),
    *[Row("whole heads", (cut,) * 6, (cut,) * 3) for cut in (BATCH, HEADS)],
    Row("some queries", (TOKENS, TOKENS, R, R, TOKENS, TOKENS), (TOKENS, P, P)),
]


@dataclass(frozen=True)
class KernelPlan:
    operands: tuple[Layout, ...]
    results: tuple[Layout, ...]
    present: bool  # False on a rank outside of the mesh
    empty: bool  # this rank has no queries, heads or samples


@planned
def plan_kernel(backward: bool, *specs: _torch.Spec) -> KernelPlan:
    given = [Layout.of(spec) for spec in specs]
    names = ("grad_out", "query", "key", "value", "out", "logsumexp") if backward else ("query", "key", "value")
    named = list(zip(names, given, strict=True))
    query, key, value = given[1:4] if backward else given
    if len(query.shape) != 4 or key.shape != value.shape or prod(key.shape) == 0:
        raise refuse("flash_attention_for_cpu", "needs 4 dimensions, and keys and values of one shape", named,
                     "call scaled_dot_product_attention, which takes others too")  # fmt: skip
    chosen = choose("flash_attention_for_cpu", BACKWARD if backward else FORWARD, named)
    operands = tuple(layout.placed(input_placements(chosen, number)) for number, layout in enumerate(given))
    if backward:
        shapes = [(layout.shape, layout.dtype) for layout in (query, key, value)]
    else:
        shapes = [((*query.shape[:3], value.shape[3]), query.dtype), (query.shape[:3], wide(query.dtype))]
    results = tuple(
        new(query, shape, output_placements(chosen, number), dtype) for number, (shape, dtype) in enumerate(shapes)
    )
    own = operands[1 if backward else 0]
    return KernelPlan(operands, results, own.mesh.get_coordinate() is not None, not prod(own.local_shape))


def _run(operator: _torch.Operator, tensors: tuple[Any, ...], rest: tuple[Any, ...]) -> tuple[DTensor, ...]:
    backward = len(tensors) > 3
    specs = check_placed("flash_attention_for_cpu", [(f"tensor {n}", tensor) for n, tensor in enumerate(tensors)])
    dropout, causal, mask, scale = rest
    plan = plan_kernel(backward, *specs)
    if dropout or mask is not None or (causal and plan.operands[0].cuts.get(2)):
        raise refuse("flash_attention_for_cpu", "dropout, a mask, or causal attention over sharded tokens",
                     [("query", tensors[1 if backward else 0])], "call scaled_dot_product_attention")  # fmt: skip
    if not plan.present:
        return tuple(absent(tensors[0], layout) for layout in plan.results)
    local = [_innermost(move(tensor, target)) for tensor, target in zip(tensors, plan.operands, strict=True)]
    if plan.empty:
        results = [local[0].new_zeros(layout.local_shape) for layout in plan.results]
    else:
        results = operator(*local, dropout, causal, scale=scale)
    return tuple(wrap_dense(result, layout) for result, layout in zip(results, plan.results, strict=True))


def _innermost(tensor: torch.Tensor) -> torch.Tensor:
    """The kernel takes the numbers of a token for neighbours in memory, and does not look whether they are."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


@rule(aten._scaled_dot_product_flash_attention_for_cpu.default, behaviour=KERNEL)
def fused(operator: _torch.Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[DTensor, ...]:
    values = _torch.arguments(operator, args, kwargs)
    return _run(operator, values[:3], values[3:])


@rule(aten._scaled_dot_product_flash_attention_for_cpu_backward.default, behaviour=KERNEL)
def fused_backward(operator: _torch.Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[DTensor, ...]:
    values = _torch.arguments(operator, args, kwargs)
    return _run(operator, values[:6], values[6:])
