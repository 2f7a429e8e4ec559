"""Running sums, and products, along sharded dimensions: each rank's own, and what the ranks before it have."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor

from ... import _torch
from ...comm import all_gather_stacked, rank_line
from ...sharding.redistribute import move
from ...sharding.registry import Behaviour, rule
from ..sorting.sort_topk import begin_order, run_whole
from .plan import begin

aten = torch.ops.aten

RUNNING = Behaviour("all dimensions", "nothing; each rank's total, to all other ranks, if the dimension is sharded")
PRODUCT = Behaviour("all dimensions; reduced ones come out replicated", "each rank's product to all other ranks")


@rule(aten.cumsum.default, aten.cumprod.default, behaviour=RUNNING)
def running(operator: _torch.Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> DTensor:
    input, dim, dtype = _torch.arguments(operator, args, kwargs)
    plan = begin_order(operator, (input, dim, dtype))
    mesh_dims = plan.given.sharded_dims.get(plan.dim, ())
    if not mesh_dims or not plan.given.present:
        result: DTensor = run_whole(operator, (input, dim, dtype), plan)
        return result
    local = move(input, plan.given)
    own = operator(local, plan.dim, dtype=dtype)
    adds = operator is aten.cumsum.default
    whole = (local.sum if adds else local.prod)(plan.dim, keepdim=True, dtype=own.dtype)
    everyone = all_gather_stacked(whole, plan.given.mesh, mesh_dims)
    before = everyone[: rank_line(plan.given.mesh, mesh_dims).rank]
    own = own + before.sum(0) if adds else own * before.prod(0)
    own = _torch.after_the_last(own)  # of which the first rank uses nothing
    return _torch.wrap(own.contiguous(), plan.given.typed(own.dtype).dense.spec)


@rule(aten.prod.default, aten.prod.dim_int, behaviour=PRODUCT)
def prod(operator: _torch.Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> DTensor:
    input, *rest = _torch.arguments(operator, args, kwargs)
    dim, keepdim, dtype = rest if len(rest) == 3 else (None, False, *rest)
    floating = input.dtype.is_floating_point or input.dtype.is_complex
    dtype = dtype or (input.dtype if floating else torch.int64)
    plan, local = begin("prod", input, dim, keepdim)
    if local is None:
        return plan.output.typed(dtype).absent(input)
    own = local.to(dtype)
    for reduced in plan.dims:
        own = own.prod(reduced, keepdim=True)
    if plan.mesh_dims:
        own = all_gather_stacked(own, plan.mesh, plan.mesh_dims).prod(0)
    return plan.wrap(own, dtype)
