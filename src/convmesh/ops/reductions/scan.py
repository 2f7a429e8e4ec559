"""Cumulative sums and products along sharded dimensions: each rank's own, combined with earlier ranks' totals."""

from __future__ import annotations

from typing import Any

import torch

from ... import _torch
from ...comm import all_gather_stacked, rank_line
from ...sharding.call import Call
from ...sharding.layout import Layout
from ...sharding.plan_rule import plan_rule
from ...sharding.registry import Behaviour
from ..sorting.sort_topk import OrderedDim
from .basic import STAYS, dims_and_dtype, summed_dtype
from .plan import Reduction

aten = torch.ops.aten

CUMULATIVE = Behaviour("all dimensions", "nothing; all-gather of the ranks' totals if the dimension is sharded")
PRODUCT = Behaviour(STAYS, "all-gather of the ranks' products")


@plan_rule(aten.cumsum.default, aten.cumprod.default, behaviour=CUMULATIVE, remembers=True)
def cumulative(operator: _torch.Operator, input: Layout, dim: int, requested_dtype: torch.dtype | None) -> Call:
    order, dtype = OrderedDim.of(input, dim), summed_dtype(input, requested_dtype)
    layout, mesh_dims, adds = order.input, order.mesh_dims, operator is aten.cumsum.default
    if not mesh_dims:
        return order.call(operator, order.length, dtype)

    def run(local: torch.Tensor, *_: Any) -> torch.Tensor:
        own = operator(local, order.dim, dtype=dtype)
        combined = (local.sum if adds else local.prod)(order.dim, keepdim=True, dtype=dtype)
        before = all_gather_stacked(combined, layout.mesh, mesh_dims)[: rank_line(layout.mesh, mesh_dims).rank]
        own = own + before.sum(0) if adds else own * before.prod(0)
        return _torch.after_the_last(own)  # the first rank uses nothing of the all-gather

    return Call((layout,), layout.typed(dtype).dense, run)


@plan_rule(aten.prod.default, aten.prod.dim_int, behaviour=PRODUCT, remembers=True)
def prod(operator: _torch.Operator, input: Layout, *how: Any) -> Call:
    dim, keepdim, requested_dtype = dims_and_dtype(how)
    dtype = summed_dtype(input, requested_dtype)
    plan = Reduction.of(input, dim, keepdim)

    def run(local: torch.Tensor) -> torch.Tensor:
        own = local.to(dtype)
        for reduced in plan.dims:
            own = own.prod(reduced, keepdim=True)
        return all_gather_stacked(own, plan.mesh, plan.mesh_dims).prod(0) if plan.mesh_dims else own

    return plan.call(run, dtype)
