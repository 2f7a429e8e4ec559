"""Multiplying by a number, for the gradients of means.

The gradient of a mean over everything is one value, expanded to the full input on every rank: it takes no storage until
it is divided by the count. Here it stays expanded, and each rank narrows it to its shard later.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Partial, Placement, Replicate

from ... import _torch
from ...sharding.layout import Layout, dense_stride
from ...sharding.plan_cache import planned
from ...sharding.registry import Behaviour, rule

aten = torch.ops.aten

BEHAVIOUR = Behaviour(
    "all dimensions, Partial(sum), Partial(avg); for neg also Partial(max) and Partial(min)", "nothing"
)
NEGATIVE: dict[Placement, Placement] = {Partial("max"): Partial("min"), Partial("min"): Partial("max")}


@planned
def plan_scale(spec: _torch.Spec, dtype: torch.dtype, expanded: tuple[int, ...], negates: bool) -> Layout:
    """Return the result's layout; along `expanded` dimensions its strides are 0."""
    input = Layout.of(spec).typed(dtype)
    if negates:
        input = input.placed(tuple(NEGATIVE.get(placement, placement) for placement in input.placements))
    if not expanded:
        return input.dense
    sizes = tuple(1 if dim in expanded else size for dim, size in enumerate(input.shape))
    stride = dense_stride(sizes, torch.contiguous_format)
    stride = tuple(0 if dim in expanded else step for dim, step in enumerate(stride))
    return Layout(input.mesh, input.placements, input.shape, stride, dtype)


@planned
def layout_for_scaling(spec: _torch.Spec, negates: bool) -> Layout | None:
    """Return the layout that a tensor must be redistributed to before it is scaled, or None.

    Sums and averages may stay Partial, and for `neg` also extremes.
    """
    stay = {Partial("sum"), Partial("avg"), *(NEGATIVE if negates else ())}
    placements = tuple(Replicate() if isinstance(p, Partial) and p not in stay else p for p in spec.placements)
    return None if placements == spec.placements else Layout.of(spec).placed(placements)


@rule(aten.div.Scalar, aten.mul.Scalar, aten.neg.default, behaviour=BEHAVIOUR)
def scale(operator: _torch.Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> DTensor:
    input, *number = _torch.arguments(operator, args, kwargs)
    spec = _torch.spec_of(input)
    negates = operator is aten.neg.default
    target = layout_for_scaling(spec, negates)
    local = _torch.local_of(input)
    if target is not None:
        local, spec = _torch.redistribute(local, spec, target.spec), target.spec
    expanded: tuple[int, ...] = ()
    if _torch.in_backward():  # in forward the result may be written to, so it needs storage of its own
        sizes = zip(local.stride(), local.shape, spec.shape, strict=False)
        expanded = tuple(dim for dim, (step, here, size) in enumerate(sizes) if step == 0 and here == size > 1)
    small = local
    for dim in expanded:
        small = small.narrow(dim, 0, 1)
    result = operator(small, *number)
    layout = plan_scale(spec, result.dtype, expanded, negates)
    return _torch.wrap(result.expand(local.shape) if expanded else result, layout.spec)
