"""Filling tensors in place."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor

from ... import _torch
from ...sharding.layout import Layout
from ...sharding.plan_cache import planned
from ...sharding.redistribute import move
from ...sharding.registry import Behaviour, rule

aten = torch.ops.aten

FILL = Behaviour("all dimensions, Partial", "what is written into a part of a sharded dimension, to its owners")


@rule(aten.fill_.Scalar, aten.fill_.Tensor, aten.zero_.default, behaviour=FILL)
def fill(operator: _torch.Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Of Partial(sum), one rank has the value, and the others zeros."""
    target, *value = args
    local = _torch.local_of(target)
    if not value:
        local.zero_()
    else:
        whole = _whole(value[0])
        local.fill_(whole if _layout(_torch.spec_of(target)).adds_once else 0)
    return target


@planned
def _layout(spec: _torch.Spec) -> Layout:
    return Layout.of(spec)


def _whole(value: Any) -> Any:
    if not isinstance(value, DTensor):
        return value
    layout = Layout.of(_torch.spec_of(value))
    return move(value, layout.replicated())
