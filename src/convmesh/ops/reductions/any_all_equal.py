"""Whether tensors are equal, and whether any or all values are true: ranks all-reduce what holds for their shards."""

from __future__ import annotations

from typing import Any

import torch

from ... import _torch
from ...comm import all_reduce
from ...sharding.call import Call
from ...sharding.layout import Layout
from ...sharding.plan_rule import plan_rule
from ...sharding.redistribute import check_placed, move
from ...sharding.registry import Behaviour, rule
from .basic import SMALL, extreme_of
from .plan import Reduction

EQUAL = Behaviour("all dimensions", "all-reduce of one value; operands with other placements")


aten = torch.ops.aten


@rule(aten.equal.default, behaviour=EQUAL)
def equal(operator: _torch.Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether two tensors are equal.

    torch would ask all ranks of the world, of which those outside of the mesh do not answer. Not a `plan_rule`: the
    result is no tensor, so there is no `Call` for it.
    """
    one, other = args
    check_placed("equal", (("self", one), ("other", other)))
    if one.shape != other.shape:
        return False
    layout = Layout.of(_torch.spec_of(one)).without_partial()
    if not layout.present:
        return True
    local, other_local = move(one, layout), move(other, Layout.of(_torch.spec_of(other)).placed(layout.placements))
    same = torch.tensor(int(local.equal(other_local)), device=local.device)
    return bool(all_reduce(same, layout.mesh, layout.sharded_over(), "min").item())


@rule(aten.allclose.default, behaviour=EQUAL)
def allclose(operator: _torch.Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    one, other, *tolerances = _torch.arguments(operator, args, kwargs)
    check_placed("allclose", (("self", one), ("other", other)))
    every = aten.all.default(aten.isclose.default(one, other, *tolerances))
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
