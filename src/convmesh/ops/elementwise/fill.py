"""Filling tensors in place, and new tensors like others."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Partial

from ... import _torch
from ...sharding.layout import Layout
from ...sharding.plan_cache import planned
from ...sharding.redistribute import move
from ...sharding.registry import Behaviour, rule
from ...sharding.result_strides import strides_of
from ...strides import Stride

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


@rule(
    aten.empty_like.default, aten.zeros_like.default, aten.ones_like.default, aten.full_like.default,
    behaviour=LIKE, knows_strides=True,
)  # fmt: skip
def like(operator: _torch.Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> DTensor:
    """`empty_like`, `zeros_like`, ... DTensor's own rule keeps the strides of the first memory format it is asked
    for."""
    spec, local = _torch.spec_of(args[0]), _torch.local_of(args[0])
    if not _torch.plain_order(spec):
        return _torch.stock(operator, args, kwargs)  # type: ignore[no-any-return]
    keeps = operator is aten.empty_like.default
    layout = _layout_like(spec, kwargs.get("dtype"), keeps, *strides_of(operator, args, kwargs))
    result = operator(local, *args[1:], **kwargs)
    return _torch.wrap(layout.laid(result) if layout.present else result, layout.spec)


@planned
def _layout_like(spec: _torch.Spec, dtype: torch.dtype | None, keeps_partial: bool, stride: Stride) -> Layout:
    """Return the layout of a new tensor; only an empty one may be Partial."""
    source = Layout.of(spec)
    layout = replace(source, stride=stride).typed(dtype or source.dtype)
    return layout if keeps_partial else layout.without_partial()


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
