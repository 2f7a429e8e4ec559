"""Whether tensors are equal, and whether any or all values are true: each rank says of its local tensor."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor

from ... import _torch
from ...comm import all_reduce
from ...sharding.layout import Layout
from ...sharding.redistribute import check_placed, move, move_beside
from ...sharding.registry import Behaviour, rule
from .basic import SMALL, extreme_of
from .plan import begin

EQUAL = Behaviour("all dimensions", "all-reduce of one number; operands of other placements")


aten = torch.ops.aten


@rule(aten.equal.default, behaviour=EQUAL)
def equal(operator: _torch.Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """torch asks all ranks of the world, of which those outside of the mesh do not answer."""
    one, other = args
    check_placed("equal", (("self", one), ("other", other)))
    if one.shape != other.shape:
        return False
    layout = Layout.of(_torch.spec_of(one)).without_partial()
    if not layout.present:
        return True
    mine = move(one, layout)
    same = torch.tensor(int(mine.equal(move_beside(other, layout))), device=mine.device)
    return bool(all_reduce(same, layout.mesh, layout.sharded_over(), "min").item())


@rule(aten.allclose.default, behaviour=EQUAL)
def allclose(operator: _torch.Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    one, other, *tolerances = _torch.arguments(operator, args, kwargs)
    check_placed("allclose", (("self", one), ("other", other)))
    every = aten.all.default(aten.isclose.default(one, other, *tolerances))
    return every.device_mesh.get_coordinate() is None or bool(_torch.local_of(every).item())


@rule(
    aten.any.default, aten.any.dim, aten.any.dims, aten._is_any_true.default,
    aten.all.default, aten.all.dim, aten.all.dims, aten._is_all_true.default, behaviour=SMALL,
)  # fmt: skip
def quantified(operator: _torch.Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> DTensor:
    """Any is the greatest of truths, and all is the least."""
    input, *rest = _torch.arguments(operator, args, kwargs)
    dim, keepdim = rest or (None, False)
    name = _torch.name_of(operator)
    plan, local = begin(name, input, dim, keepdim)
    kind = torch.uint8 if input.dtype == torch.uint8 else torch.bool
    if local is None:
        return plan.output.typed(kind).absent(input)
    return plan.wrap(extreme_of(plan, local != 0, greatest="any" in name), kind)
