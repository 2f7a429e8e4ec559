"""Layer norm over trailing dimensions, sharded ones included."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from math import prod
from typing import Any

import torch

from ...kernels.normalization import Pair, input_gradient, moments_of_sets, normalised, sums_by_set
from ...sharding.errors import Unfit
from ...sharding.layout import Layout
from ...sharding.registry import Behaviour, made_of_others
from ...sharding.sharding_table import P, R, Row, Shard
from ...sharding.table_plan import TablePlan
from ...sharding.table_rule import Like, table_rule
from ..reductions.plan import wide
from .common import Spread

aten = torch.ops.aten

made_of_others(aten.layer_norm.default, aten.rms_norm.default)

LAYER_NORM = Behaviour("all dimensions", "nothing; 2 values per row and rank where normalized dimensions are sharded")

Shape = Sequence[int]


def first_normalised(input: Layout, shape: Shape, *parameters: Layout | None) -> int:
    """The first of the dimensions that are normalised over."""
    sizes, axis = tuple(shape), input.ndim - len(shape)
    if axis < 0 or not sizes or input.shape[axis:] != sizes:
        raise Unfit(f"the input's last sizes are not {sizes}", "make normalized_shape the last sizes of the input")
    if any(given is not None and given.shape != sizes for given in parameters):
        raise Unfit(f"weight or bias has another shape than {sizes}", "give it that shape")
    return axis


def forward_rows(input: Layout, shape: Shape, *parameters: Layout | None, statistics: int) -> Iterator[Row]:
    """input, parameters -> output, statistics of each row"""
    axis, count = first_normalised(input, shape, *parameters), len(parameters)
    yield Row("replicated", (R,) * (1 + count), (R,) * (1 + statistics))
    for dim in range(axis):
        yield Row("rows", (Shard(dim), *(R,) * count), (Shard(dim),) * (1 + statistics))
    for dim in range(axis, input.ndim):
        yield Row("normalised", (Shard(dim), *(Shard(dim - axis),) * count), (Shard(dim), *(R,) * statistics))


def backward_rows(input: Layout, shape: Shape, *parameters: Layout | None, statistics: int) -> Iterator[Row]:
    """grad_output, input, statistics, parameters -> gradients of input and parameters"""
    axis, count = first_normalised(input, shape, *parameters), len(parameters)
    yield Row("replicated", (R,) * (2 + statistics + count), (R,) * (1 + count))
    for dim in range(axis):
        at = Shard(dim)
        yield Row("rows", (*(at,) * (2 + statistics), *(R,) * count), (at, *(P,) * count))
    for dim in range(axis, input.ndim):
        at, beside = Shard(dim), (Shard(dim - axis),) * count
        yield Row("normalised", (at, at, *(R,) * statistics, *beside), (at, *beside))


def spread_of(input: Layout, shape: Shape) -> Spread:
    return Spread.over(input, range(input.ndim - len(shape), input.ndim))


def _normalised(plan: TablePlan, input: Layout, shape: Shape, *_: object) -> Callable[..., tuple[torch.Tensor, ...]]:
    spread = spread_of(input, shape)
    if not spread.mesh_dims:
        return plan.operator

    def local(x: torch.Tensor, shape: Shape, w: Any, b: Any, eps: float) -> tuple[torch.Tensor, ...]:
        x = x.to(wide(x.dtype)).contiguous()
        rows = x.shape[: x.dim() - len(shape)]
        by_row = (*rows, *[1] * len(shape))
        compiled = spread.compiled()
        mean, var = spread.merge(*(t.view(by_row) for t in moments_of_sets(x, prod(rows), compiled)))
        y = normalised(x, (mean, var), eps, compiled=compiled)
        y = y if w is None else y.mul_(w)
        return (y if b is None else y.add_(b)), mean, (var + eps).rsqrt()

    return local


@table_rule(aten.native_layer_norm.default, behaviour=LAYER_NORM, local=_normalised, communicates=True)
def layer_norm(input: Layout, shape: Shape, weight: Layout | None, bias: Layout | None, eps: float) -> Iterator[Row]:
    return forward_rows(input, shape, weight, bias, statistics=2)


def _gradients(
    plan: TablePlan, grad_output: Layout, input: Layout, shape: Shape, *_: object
) -> Callable[..., tuple[Any, ...]]:
    spread = spread_of(input, shape)
    outer = tuple(range(input.ndim - len(shape)))
    if not spread.mesh_dims and 0 not in input.local_shape:
        return plan.operator

    def over_rows(values: torch.Tensor) -> torch.Tensor:
        return values.sum(outer) if outer else values

    def local(
        gy: torch.Tensor, x: torch.Tensor, shape: Shape, mean: torch.Tensor, rstd: torch.Tensor, w: Any, b: Any,
        mask: Sequence[bool],
    ) -> tuple[Any, ...]:  # fmt: skip
        gy, x = (t.to(mean.dtype) for t in (gy, x))
        compiled = spread.compiled()
        for_input = for_weight = for_bias = None
        if mask[0]:
            scaled = gy if w is None else gy * w
            sums = spread.start_adding_up(*sums_by_set(scaled, x, mean, rstd, compiled))

            def means() -> Pair:
                first, second = sums()
                return first / spread.count, second / spread.count

            for_input = input_gradient(scaled, x, (mean, rstd), means, compiled=compiled)
        if mask[1]:
            for_weight = over_rows((x - mean).mul_(rstd).mul_(gy))
        if mask[2]:
            for_bias = over_rows(gy)
        return for_input, for_weight, for_bias

    return local


@table_rule(
    aten.native_layer_norm_backward.default, behaviour=LAYER_NORM, local=_gradients, communicates=True,
    results=(None, Like("weight", decides=False), Like("bias", decides=False)),
)  # fmt: skip
def layer_norm_backward(
    grad_output: Layout, input: Layout, shape: Shape, mean: Layout, rstd: Layout, weight: Layout | None,
    bias: Layout | None, mask: Sequence[bool],
) -> Iterator[Row]:  # fmt: skip
    return backward_rows(input, shape, weight, bias, statistics=2)
