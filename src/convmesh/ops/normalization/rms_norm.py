"""RMS norm as one operator, as devices have it that fuse it. Elsewhere torch makes it of a mean and products."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from ...comm import all_reduce
from ...sharding.layout import Layout
from ...sharding.registry import Behaviour
from ...sharding.sharding_table import Row
from ...sharding.table_plan import TablePlan
from ...sharding.table_rule import Like, table_rule
from ..reductions.plan import wide
from .common import Spread
from .layer_norm import Shape, backward_rows, forward_rows, spread_of

aten = torch.ops.aten

RMS_NORM = Behaviour(
    "all dimensions", "nothing; all-reduce of one value per row where normalized dimensions are sharded"
)


def _mean(values: torch.Tensor, spread: Spread, dims: int) -> torch.Tensor:
    """Over the last dimensions, and all ranks that have some of them."""
    own = values.sum(tuple(range(-dims, 0)), keepdim=True)
    return all_reduce(own, spread.mesh, spread.mesh_dims) / spread.count


def _normalised(plan: TablePlan, input: Layout, shape: Shape, *_: object) -> Callable[..., tuple[torch.Tensor, ...]]:
    spread = spread_of(input, shape)
    if not spread.mesh_dims:
        return plan.operator

    def local(x: torch.Tensor, shape: Shape, w: Any, eps: float | None) -> tuple[torch.Tensor, ...]:
        eps = torch.finfo(x.dtype).eps if eps is None else eps
        x = x.to(wide(x.dtype))
        rstd = (_mean(x.square(), spread, len(shape)) + eps).rsqrt()
        y = x * rstd
        return y if w is None else y.mul_(w), rstd

    return local


@table_rule(aten._fused_rms_norm.default, behaviour=RMS_NORM, local=_normalised, communicates=True)
def rms_norm(input: Layout, shape: Shape, weight: Layout | None, eps: float | None) -> Iterator[Row]:
    return forward_rows(input, shape, weight, statistics=1)


def _gradients(
    plan: TablePlan, grad_output: Layout, input: Layout, shape: Shape, *_: object
) -> Callable[..., tuple[torch.Tensor | None, ...]]:
    spread, outer = spread_of(input, shape), tuple(range(input.ndim - len(shape)))

    def local(
        gy: torch.Tensor, x: torch.Tensor, shape: Shape, rstd: torch.Tensor, w: Any, mask: Sequence[bool]
    ) -> tuple[torch.Tensor | None, ...]:
        gy = gy.to(wide(x.dtype))
        normal = x * rstd
        scaled = gy if w is None else gy * w
        for_weight = (gy * normal).sum(outer) if outer else gy * normal
        mean = _mean(scaled * normal, spread, len(shape))
        gx = (scaled - normal.mul_(mean)).mul_(rstd)
        return gx if mask[0] else None, for_weight if mask[1] else None

    return local


@table_rule(
    aten._fused_rms_norm_backward.default, behaviour=RMS_NORM, local=_gradients, communicates=True,
    results=(None, Like("weight", decides=False)),
)  # fmt: skip
def rms_norm_backward(
    grad_output: Layout, input: Layout, shape: Shape, rstd: Layout, weight: Layout | None, mask: Sequence[bool]
) -> Iterator[Row]:
    return backward_rows(input, shape, weight, statistics=1)
