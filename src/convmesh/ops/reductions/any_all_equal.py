"""Whether tensors are equal, and whether any or all values are true: ranks all-reduce what holds for their shards."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor

from ... import _torch
from ...comm import all_reduce
from ...sharding.call import Call
from ...sharding.layout import Layout
from ...sharding.plan_rule import Made, plan_rule
from ...sharding.redistribute import move
from ...sharding.registry import Behaviour
from .basic import SMALL, extreme_of
from .plan import Reduction

EQUAL = Behaviour("all dimensions", "all-reduce of one value; operands with other placements")


aten = torch.ops.aten


@plan_rule(aten.equal.default, behaviour=EQUAL)
def equal(operator: _torch.Operator, one: Layout, other: Layout) -> Made:
    """Whether two tensors are equal: torch would ask all ranks of the world, also those outside of the mesh."""
    layout = one.without_partial()
    wanted = other.placed(layout.placements)

    def are_equal(one: DTensor, other: DTensor) -> bool:
        if layout.shape != wanted.shape or not layout.present:
            return layout.shape == wanted.shape
        local, other_local = move(one, layout), move(other, wanted)
        same = torch.tensor(int(local.equal(other_local)), device=local.device)
        return bool(all_reduce(same, layout.mesh, layout.sharded_over(), "min").item())

    return are_equal


@plan_rule(aten.allclose.default, behaviour=EQUAL)
def allclose(operator: _torch.Operator, *_: Any) -> Made:
    return _all_close


def _all_close(*args: Any) -> bool:
    every = aten.all.default(aten.isclose.default(*args))
    return every.device_mesh.get_coordinate() is None or bool(_torch.local_of(every).item())


@plan_rule(
    aten.any.default, aten.any.dim, aten.any.dims, aten._is_any_true.default,
    aten.all.default, aten.all.dim, aten.all.dims, aten._is_all_true.default, behaviour=SMALL,
)  # fmt: skip
def any_all(operator: _torch.Operator, input: Layout, dim: Any = None, keepdim: bool = False) -> Call:
    """`any` is the maximum of the truth values, and `all` the minimum."""
    plan = Reduction.of(input, dim, keepdim)
    greatest = "any" in _torch.name_of(operator)
    kind = torch.uint8 if input.dtype == torch.uint8 else torch.bool
    return plan.call(lambda local: extreme_of(plan, local != 0, greatest), kind)
