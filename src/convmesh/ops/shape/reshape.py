"""Reshaping DTensors whose shards are not those of the new shape.

The gradient gets the placements that the tensor had, and so do merged dimensions once they are split again. What torch
can do as a view stays a view.
"""

from __future__ import annotations

from math import prod
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Replicate, Shard

from ... import _torch
from ...sharding.call import copy_of
from ...sharding.gradient_placements import Hints
from ...sharding.layout import Layout, dense_stride, reduced
from ...sharding.redistribute import check_placed, move
from ...sharding.registry import Behaviour, made_of_others, rule
from . import merged_dims
from .reshape_plan import full_shape, is_strided, plan_local_view, plan_shard_view, plan_view

aten = torch.ops.aten

VIEW = Behaviour(
    "dimensions whose shards are shards of the new shape, too; for others, another dimension is sharded instead",
    "nothing; an all-to-all where another dimension is sharded, or it is gathered if all others are too short",
)  # fmt: skip

made_of_others(aten.reshape.default, aten.flatten.using_ints, aten.unflatten.int)


_original_placements = Hints()


@rule(aten.view.default, aten._unsafe_view.default, behaviour=VIEW)
def view(operator: _torch.Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Reshape the tensor.

    Not a `plan_rule`: only a local tensor knows whether it can be viewed, and placements of earlier calls count.
    """
    input, wanted = _torch.arguments(operator, args, kwargs)
    if sum(map(_torch.has_symbols, map(_torch.known, input.shape))) > 1:
        _torch.settle(input)  # torch does not trace products of several symbols
    before = tuple(map(_torch.known, input.shape))
    shape = full_shape(before, tuple(map(_torch.known, wanted)))
    if not prod(before) and not prod(shape):
        return _empty_result(_torch.spec_of(input), _torch.local_of(input), shape)
    if not any(type(p) is Shard for p in input.placements) or any(is_strided(p) for p in input.placements):
        output = plan_local_view(_torch.spec_of(input), shape)
        if output is None:
            return _torch.stock(operator, args, kwargs)
        return _view_shards(operator, args, kwargs, output)
    preferred = _original_placements.recall((input.device_mesh, before, shape, input.placements))
    if prod(shape) == prod(before):
        merged_dims.remember(_torch.spec_of(input), shape)
        preferred = merged_dims.recall(_torch.spec_of(input), shape) if preferred is None else preferred
    plan = plan_view(_torch.spec_of(input), shape, preferred)
    if plan is None:
        output = plan_shard_view(_torch.spec_of(input), shape)
        return _torch.stock(operator, args, kwargs) if output is None else _view_shards(operator, args, kwargs, output)
    check_placed("view", (("input", input),))
    gradient_key = (input.device_mesh, shape, before, plan.output.placements)
    _original_placements.remember(gradient_key, tuple(reduced(placement, "sum") for placement in input.placements))
    is_sent = _is_sent(input, plan.source)
    local = move(input, plan.source) if is_sent else _torch.local_of(input)
    if plan.output.present:
        local = (local if plan.reshard is None else plan.reshard(local)).reshape(plan.output.local_shape)
    if plan.wanted is plan.output and plan.reshard is None and not is_sent:
        return _torch.as_view(operator, args, kwargs, _torch.wrap(local, plan.output.spec))
    # A redistributed tensor may have gaps in its storage, but the next view of it relies on the strides in its spec.
    result = _torch.wrap(plan.output.laid(local), plan.output.spec)
    if plan.wanted is not plan.output:
        result = _torch.wrap(plan.wanted.laid(move(result, plan.wanted)), plan.wanted.spec)
    return _copy(result, input)


def _is_sent(input: DTensor, target: Layout) -> bool:
    """Whether redistributing to `target` sends anything: over a mesh dimension of one rank it does not."""
    placements = zip(input.placements, target.placements, strict=True)
    return any(p != q and target.mesh.size(m) > 1 for m, (p, q) in enumerate(placements))


def _view_shards(operator: _torch.Operator, args: tuple[Any, ...], kwargs: dict[str, Any], output: Layout) -> Any:
    """View every rank's own shard, or copy it where its strides differ from those of the full tensor's spec.

    Shards that were gathered, or computed from redistributed tensors, may have such strides, perhaps on some ranks
    only. If those alone raised, the others would wait for them.
    """
    local = _torch.local_of(args[0])
    try:
        viewed = local.view(output.local_shape)
    except RuntimeError:
        return _copy(_torch.wrap(local.reshape(output.local_shape), output.spec), args[0])
    return _torch.as_view(operator, args, kwargs, _torch.wrap(viewed, output.spec))


def _copy(result: DTensor, input: DTensor) -> DTensor:
    """Note that `result` is a copy of `input` that torch takes for a view, so that writes into it are put back."""
    shape, before = tuple(result.shape), tuple(input.shape)
    ways = lambda full: aten.view.default(full, shape), lambda full, part: aten.view.default(part, before)
    copy: DTensor = copy_of(result, input, ways)
    return copy


def _empty_result(spec: _torch.Spec, local: torch.Tensor, shape: tuple[int, ...]) -> DTensor:
    """Return an empty result, which is replicated: torch divides by its size."""
    layout = Layout.of(spec)
    replicated = (Replicate(),) * layout.mesh.ndim
    output = Layout(layout.mesh, replicated, shape, dense_stride(shape, torch.contiguous_format), layout.dtype)
    return _torch.wrap(local.new_empty(output.local_shape), output.spec)
