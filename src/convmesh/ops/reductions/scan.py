"""Running sums, and products, along sharded dimensions: each rank's own, and what the ranks before it have."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor

from ... import _torch
from ...comm import all_gather_stacked, rank_line
from ...sharding.call import Call
from ...sharding.layout import Layout
from ...sharding.plan_rule import plan_rule
from ...sharding.redistribute import move
from ...sharding.registry import Behaviour, rule
from ..sorting.sort_topk import begin_order, run_unsharded
from .basic import dims_and_dtype, summed_dtype
from .plan import Reduction

aten = torch.ops.aten

RUNNING = Behaviour("all dimensions", "nothing; each rank's total, to all other ranks, if the dimension is sharded")
PRODUCT = Behaviour("all dimensions; reduced ones come out replicated", "each rank's product to all other ranks")


@rule(aten.cumsum.default, aten.cumprod.default, behaviour=RUNNING)
def running(operator: _torch.Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> DTensor:
    input, dim, dtype = _torch.arguments(operator, args, kwargs)
    plan = begin_order(operator, (input, dim, dtype))
    mesh_dims = plan.given.sharded_dims.get(plan.dim, ())
    if not mesh_dims or not plan.given.present:
        result: DTensor = run_unsharded(operator, (input, dim, dtype), plan)
        return result
    local = move(input, plan.given)
    own = operator(local, plan.dim, dtype=dtype)
    adds = operator is aten.cumsum.default
    combined = (local.sum if adds else local.prod)(plan.dim, keepdim=True, dtype=own.dtype)
    everyone = all_gather_stacked(combined, plan.given.mesh, mesh_dims)
    before = everyone[: rank_line(plan.given.mesh, mesh_dims).rank]
    own = own + before.sum(0) if adds else own * before.prod(0)
    own = _torch.after_the_last(own)  # of which the first rank uses nothing
    return _torch.wrap(own.contiguous(), plan.given.typed(own.dtype).dense.spec)


@plan_rule(aten.prod.default, aten.prod.dim_int, behaviour=PRODUCT, remembers=True)
def prod(operator: _torch.Operator, input: Layout, *how: Any) -> Call:
    dim, keepdim, asked = dims_and_dtype(how)
    dtype = summed_dtype(input, asked)
    plan = Reduction.of(input, dim, keepdim)

    def run(local: torch.Tensor) -> torch.Tensor:
        own = local.to(dtype)
        for reduced in plan.dims:
            own = own.prod(reduced, keepdim=True)
        return all_gather_stacked(own, plan.mesh, plan.mesh_dims).prod(0) if plan.mesh_dims else own

    return plan.call(run, dtype)
