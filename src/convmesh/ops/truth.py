"""Whether tensors are equal: each rank says of its own part, and all have to agree."""

from __future__ import annotations

from typing import Any

import torch

from .. import _torch
from ..comm import all_reduce
from ..sharding.dispatch import check_placed, move, move_beside
from ..sharding.layout import Layout
from ..sharding.registry import Behaviour, rule
from .reduce_plan import cutting, settled

EQUAL = Behaviour("reductions", "all dimensions", "all-reduce of one number; operands that lie differently")


@rule(torch.ops.aten.equal.default, behaviour=EQUAL)
def equal(operator: _torch.Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """torch asks all ranks of the world, of which those outside of the mesh do not answer."""
    one, other = args
    check_placed("equal", (("self", one), ("other", other)))
    if one.shape != other.shape:
        return False
    layout = settled(Layout.of(_torch.spec_of(one)))
    if layout.mesh.get_coordinate() is None:
        return True
    mine = move(one, layout)
    same = torch.tensor(int(mine.equal(move_beside(other, layout))), device=mine.device)
    return bool(all_reduce(same, layout.mesh, cutting(layout, range(len(layout.shape))), "min").item())
