"""Losses that compare input and target elementwise: every rank its shard, then one value is all-reduced."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from math import prod
from typing import Any

import torch

from ... import _torch
from ...comm import all_reduce
from ...sharding.registry import Behaviour, made_of_others
from ...sharding.sharding_table import R, Row, elementwise_rows
from ...sharding.table_plan import TablePlan
from ...sharding.table_rule import table_rule
from ..reductions.plan import wide

aten = torch.ops.aten

NONE, MEAN, SUM = 0, 1, 2

FORWARD = Behaviour("all dimensions", "nothing; all-reduce of one value for mean and sum")
BACKWARD = Behaviour("all dimensions", "nothing")

made_of_others(
    aten.l1_loss.default, aten.kl_div.default, aten.poisson_nll_loss.default, aten.broadcast_tensors.default,
    aten.hinge_embedding_loss.default, aten.margin_ranking_loss.default, aten.cosine_embedding_loss.default,
)  # fmt: skip


def _count(plan: TablePlan) -> int:
    """Return the number of elements that are compared on all ranks."""
    return prod(torch.broadcast_shapes(*(layout.shape for _, layout in plan.operands)))


def _with_reduction(plan: TablePlan, values: tuple[Any, ...], reduction: int) -> torch.Tensor:
    """Call the operator with another reduction."""
    place = _torch.signature(plan.operator).names.index("reduction")
    result: torch.Tensor = _torch.call(plan.operator, (*values[:place], reduction, *values[place + 1 :]))
    return result


def _local_loss(plan: TablePlan, *arguments: Any) -> Callable[..., torch.Tensor]:
    """Return the local loss, whose mean or sum is over all ranks."""
    reduction = _through_reduction(arguments)[-1]
    mesh, count = plan.operand().mesh, _count(plan)
    mesh_dims = sorted({mesh_dim for _, layout in plan.operands for mesh_dim in layout.sharded_over()})

    def loss(*values: Any) -> torch.Tensor:
        if not mesh_dims or reduction == NONE:
            return _with_reduction(plan, values, reduction)
        each = _with_reduction(plan, values, NONE)
        total = all_reduce(each.sum(dtype=wide(each.dtype)), mesh, mesh_dims)
        return (total / count if reduction == MEAN else total).to(each.dtype)

    return loss


@table_rule(
    aten.mse_loss.default, aten.smooth_l1_loss.default, aten.huber_loss.default, aten.binary_cross_entropy.default,
    aten.binary_cross_entropy_with_logits.default, aten.soft_margin_loss.default, behaviour=FORWARD, local=_local_loss,
    communicates=True,
)  # fmt: skip
def loss(*arguments: Any) -> Iterator[Row]:
    *tensors, reduction = _through_reduction(arguments)
    for row in elementwise_rows(tensors):
        yield Row(row.name, row.inputs, (R,) if reduction else row.outputs)


def _through_reduction(arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the arguments up to the reduction: the tensors, and the first integer after them."""
    end = next(place for place, argument in enumerate(arguments) if isinstance(argument, int))
    return arguments[: end + 1]


def _local_backward(plan: TablePlan, *arguments: Any) -> Callable[..., torch.Tensor]:
    """Return the local backward: a mean is over all ranks' elements, of which the kernel knows only its own."""
    reduction, count = _through_reduction(arguments)[-1], _count(plan)

    def backward(gradient: torch.Tensor, *values: Any) -> torch.Tensor:
        gradient = gradient / count if reduction == MEAN else gradient
        return _with_reduction(plan, (gradient, *values), SUM if reduction else NONE)

    return backward


@table_rule(
    aten.mse_loss_backward.default, aten.smooth_l1_loss_backward.default, aten.huber_loss_backward.default,
    aten.binary_cross_entropy_backward.default, aten.soft_margin_loss_backward.default, behaviour=BACKWARD,
    local=_local_backward,
)  # fmt: skip
def loss_backward(*arguments: Any) -> Iterator[Row]:
    """The gradient of a mean or sum is one value; in a double backward it may be one for each element."""
    *tensors, _ = _through_reduction(arguments)
    yield from elementwise_rows(tensors)
