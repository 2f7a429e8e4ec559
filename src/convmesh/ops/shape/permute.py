"""Views that permute or insert dimensions, or reinterpret elements (complex numbers as pairs), of each rank's shard.

torch's DTensor can do the same, but not in inference mode for tensors made outside of it, such as a model's parameters,
and not in place, which torch's own gradient formulas use.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Shard

from ... import _torch
from ...sharding.call import Call
from ...sharding.layout import Layout, is_plain
from ...sharding.local_views import local_views
from ...sharding.plan_rule import plan_rule
from ...sharding.registry import Behaviour, rule
from .select import SQUEEZED

aten = torch.ops.aten

VIEW = Behaviour("all dimensions, Partial(sum)", "nothing")
IN_PLACE = Behaviour("all dimensions, Partial(sum)", SQUEEZED)

# The out-of-place variant of each in-place operator.
OUT_OF_PLACE: dict[_torch.Operator, _torch.Operator] = {
    aten.unsqueeze_.default: aten.unsqueeze.default,
    aten.transpose_.default: aten.transpose.int,
    aten.t_.default: aten.t.default,
    aten.squeeze_.default: aten.squeeze.default,
    aten.squeeze_.dim: aten.squeeze.dim,
    aten.squeeze_.dims: aten.squeeze.dims,
}


def _view_layout(operator: _torch.Operator, input: Layout, *dims: Any) -> Layout | None:
    """Return the layout of the view; None where only torch's DTensor knows it, or raises."""
    if not all(map(is_plain, input.placements)):
        return None
    try:
        with _torch.no_modes():
            viewed = operator(torch.empty_strided(input.shape, input.stride, dtype=input.dtype, device="meta"), *dims)
    except (RuntimeError, IndexError):
        return None
    positions = _new_positions(operator, input.ndim, dims[0] if operator is aten.permute.default else dims)
    placements = tuple(Shard(positions[p.dim]) if isinstance(p, Shard) else p for p in input.placements)
    if any(isinstance(p, Shard) and p.dim >= viewed.dim() for p in placements):
        return None  # the dimension of real and imaginary parts is itself sharded
    return Layout(input.mesh, placements, tuple(viewed.shape), viewed.stride(), viewed.dtype)


def _without_conj(input: DTensor) -> tuple[DTensor]:
    """Resolve a lazy conjugate of the local tensor: torch does not see its conjugate bit through the DTensor."""
    local = _torch.local_of(input)
    return (_torch.wrap(local.resolve_conj(), _torch.spec_of(input)) if local.is_conj() else input,)


@plan_rule(aten.view_as_complex.default, aten._conj.default, aten._neg_view.default, behaviour=VIEW, foreign=True)
@plan_rule(aten.view_as_real.default, behaviour=VIEW, foreign=True, adapt=_without_conj)
@plan_rule(aten.detach.default, aten.alias.default, behaviour=VIEW, foreign=True, quick=_torch.view_of_itself)
@plan_rule(
    aten.permute.default, aten.transpose.int, aten.t.default, aten.unsqueeze.default, behaviour=VIEW, foreign=True,
    quick=local_views(_view_layout),
)  # fmt: skip
def view_dims(operator: _torch.Operator, input: Layout, *dims: Any) -> Call | None:
    output = _view_layout(operator, input, *dims)
    return None if output is None else Call((input,), output, operator, view=True)


def _new_positions(operator: _torch.Operator, rank: int, dims: tuple[int, ...]) -> list[int]:
    """For each dimension, its number in the result."""
    order = list(range(rank))
    if operator is aten.unsqueeze.default:
        return [dim + (dim >= dims[0] % (rank + 1)) for dim in order]
    if operator is aten.permute.default:
        order = [dim % rank for dim in dims]
    elif operator in (aten.transpose.int, aten.t.default) and rank > 1:
        one, other = (dim % rank for dim in dims or (0, 1))
        order[one], order[other] = other, one
    return [order.index(dim) for dim in range(rank)]


@rule(*OUT_OF_PLACE, behaviour=IN_PLACE)
def view_dims_in_place(operator: _torch.Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Give the argument itself the other layout."""
    view = OUT_OF_PLACE[operator](*args, **kwargs)
    _torch.relocate(args[0], _torch.local_of(view), _torch.spec_of(view))
    return _torch.as_view(operator, args, kwargs, args[0])
