"""Filling tensors in place, and new tensors like others."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Partial

from ... import _torch
from ...sharding.call import Call
from ...sharding.layout import Layout
from ...sharding.plan_cache import planned
from ...sharding.plan_rule import plan_rule
from ...sharding.redistribute import move
from ...sharding.registry import Behaviour, rule

aten = torch.ops.aten

FILL = Behaviour(
    "all dimensions, Partial", "nothing; values written into a slice of a sharded dimension, to their owners"
)
LIKE = Behaviour(
    "all dimensions; for a Partial tensor the result is replicated, and Partial from empty_like", "nothing"
)

NEW = Behaviour("all dimensions, if the new tensor has the same sizes", "nothing")


@rule(aten.fill_.Scalar, aten.fill_.Tensor, aten.zero_.default, behaviour=FILL)
def fill(operator: _torch.Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Fill in place. Of a Partial(sum), one rank gets the value and the others zeros."""
    target, *value = args
    local = _torch.local_of(target)
    if not value:
        local.zero_()
    else:
        full_value = _full_value(value[0])
        local.fill_(full_value if _layout(_torch.spec_of(target)).adds_once else 0)
    return target


@planned
def _layout(spec: _torch.Spec) -> Layout:
    return Layout.of(spec)


@plan_rule(
    aten.empty_like.default, aten.zeros_like.default, aten.ones_like.default, aten.full_like.default,
    behaviour=LIKE, varies=("fill_value",), foreign=True,
)  # fmt: skip
def like(operator: _torch.Operator, tensor: Layout, *how: Any) -> Call:
    """Make a tensor like another; DTensor's own rule keeps the strides of the first memory format it is asked for."""
    made = tensor if operator is aten.empty_like.default else tensor.without_partial()
    dtype = how[_torch.signature(operator).names.index("dtype") - 1] or tensor.dtype
    return Call((tensor,), made.typed(dtype), lambda *values: _torch.call(operator, values))


@rule(aten.new_ones.default, aten.new_full.default, behaviour=NEW, knows_strides=True)
def new(operator: _torch.Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """DTensor's own rule makes the result Partial like the tensor, so that the values would be summed over ranks."""
    spec = _torch.spec_of(args[0])
    if any(isinstance(placement, Partial) for placement in spec.placements):
        args = (_torch.wrap(_torch.local_of(args[0]), _layout(spec).without_partial().spec), *args[1:])
    return _torch.stock(operator, args, kwargs)


def _full_value(value: Any) -> Any:
    """Return the fill value as a plain tensor, which every rank has in full; a number is returned unchanged."""
    if not isinstance(value, DTensor):
        return value
    layout = Layout.of(_torch.spec_of(value))
    return move(value, layout.replicated())
