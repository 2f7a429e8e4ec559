"""Filling tensors in place."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Replicate

from ... import _torch
from ...sharding.layout import Layout, is_sum
from ...sharding.plan_cache import planned
from ...sharding.redistribute import move
from ...sharding.registry import Behaviour, rule

aten = torch.ops.aten

FILL = Behaviour("all dimensions, pending sums", "a part of a sharded dimension, back to its owners")


@rule(aten.fill_.Scalar, aten.fill_.Tensor, aten.zero_.default, behaviour=FILL)
def fill(operator: _torch.Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Of a pending sum, one rank has the value, and the others nothing to add."""
    target, *value = args
    local = _torch.local_of(target)
    if not value:
        local.zero_()
    else:
        whole = _whole(value[0])
        local.fill_(whole if _has_value(_torch.spec_of(target)) else 0)
    return target


@planned
def _has_value(spec: _torch.Spec) -> bool:
    here = spec.mesh.get_coordinate()
    return here is not None and not any(here[m] for m, placement in enumerate(spec.placements) if is_sum(placement))


def _whole(value: Any) -> Any:
    if not isinstance(value, DTensor):
        return value
    layout = Layout.of(_torch.spec_of(value))
    return move(value, layout.placed((Replicate(),) * layout.mesh.ndim))
