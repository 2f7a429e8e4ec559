"""Parts of a sharded dimension, which are copies, and filling tensors."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Partial, Replicate

from .. import _torch
from ..sharding import parts, registry
from ..sharding.dispatch import move
from ..sharding.layout import Layout
from ..sharding.registry import Behaviour, rule

aten = torch.ops.aten

FILL = Behaviour("elementwise", "all dimensions, pending sums", "a part of a sharded dimension, back to its owners")


def copy_of(part: DTensor, whole: DTensor, take: parts.Take, put_back: parts.PutBack) -> DTensor:
    """`part`, a copy of some of `whole`, of which writes are put back."""
    parts.mark(part, whole, take, put_back)
    registry.guard_writes()
    return part


@rule(aten.fill_.Scalar, aten.fill_.Tensor, aten.zero_.default, behaviour=FILL)
def fill(operator: _torch.Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Of a pending sum, one rank has the value, and the others nothing to add."""
    target, *value = args
    spec = _torch.spec_of(target)
    local, here = _torch.local_of(target), spec.mesh.get_coordinate()
    added_up = [m for m, p in enumerate(spec.placements) if isinstance(p, Partial) and p.reduce_op == "sum"]
    first = here is not None and not any(here[m] for m in added_up)
    local.fill_(_whole(value[0]) if value and first else 0)
    return target


def _whole(value: Any) -> Any:
    if not isinstance(value, DTensor):
        return value
    layout = Layout.of(_torch.spec_of(value))
    return move(value, layout.placed((Replicate(),) * layout.mesh.ndim))
