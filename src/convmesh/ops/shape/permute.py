"""Views in which dimensions change places or new ones come in, or numbers get another meaning, as pairs for complex
ones: every rank looks at its own part.

torch's DTensor does the same, but not in inference mode for tensors that were made outside of it, such as a model's
parameters, and not in place, which torch's own formulas of gradients use.
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

aten = torch.ops.aten

RENAME = Behaviour("all dimensions, Partial sums", "nothing")
IN_PLACE = Behaviour("all dimensions, Partial sums", "nothing; of a sharded dimension that goes, its one index")

# What each operator in place is without it.
NEW: dict[_torch.Operator, _torch.Operator] = {
    aten.unsqueeze_.default: aten.unsqueeze.default,
    aten.transpose_.default: aten.transpose.int,
    aten.t_.default: aten.t.default,
    aten.squeeze_.default: aten.squeeze.default,
    aten.squeeze_.dim: aten.squeeze.dim,
    aten.squeeze_.dims: aten.squeeze.dims,
}


def _seen(operator: _torch.Operator, input: Layout, *dims: Any) -> Layout | None:
    """The layout of a view; None where only torch's DTensor knows, or complains."""
    if not all(map(is_plain, input.placements)):
        return None
    try:
        with _torch.no_modes():
            viewed = operator(torch.empty_strided(input.shape, input.stride, dtype=input.dtype, device="meta"), *dims)
    except (RuntimeError, IndexError):
        return None
    places = _places(operator, input.ndim, dims[0] if operator is aten.permute.default else dims)
    placements = tuple(Shard(places[p.dim]) if isinstance(p, Shard) else p for p in input.placements)
    if any(isinstance(p, Shard) and p.dim >= viewed.dim() for p in placements):
        return None  # the pairs of complex numbers themselves are sharded
    return Layout(input.mesh, placements, tuple(viewed.shape), viewed.stride(), viewed.dtype)


def _without_conj(input: DTensor) -> tuple[DTensor]:
    """Of a DTensor, nobody sees that its local tensor is one whose conjugates are still to be taken."""
    local = _torch.local_of(input)
    return (_torch.wrap(local.resolve_conj(), _torch.spec_of(input)) if local.is_conj() else input,)


@plan_rule(aten.view_as_complex.default, aten._conj.default, aten._neg_view.default, behaviour=RENAME, foreign=True)
@plan_rule(aten.view_as_real.default, behaviour=RENAME, foreign=True, adapt=_without_conj)
@plan_rule(aten.detach.default, aten.alias.default, behaviour=RENAME, foreign=True, quick=_torch.view_of_itself)
@plan_rule(
    aten.permute.default, aten.transpose.int, aten.t.default, aten.unsqueeze.default, behaviour=RENAME, foreign=True,
    quick=local_views(_seen),
)  # fmt: skip
def rename(operator: _torch.Operator, input: Layout, *dims: Any) -> Call | None:
    output = _seen(operator, input, *dims)
    return None if output is None else Call((input,), output, operator, view=True)


def _places(operator: _torch.Operator, rank: int, dims: tuple[int, ...]) -> list[int]:
    """Where each dimension is in the result."""
    order = list(range(rank))
    if operator is aten.unsqueeze.default:
        return [dim + (dim >= dims[0] % (rank + 1)) for dim in order]
    if operator is aten.permute.default:
        order = [dim % rank for dim in dims]
    elif operator in (aten.transpose.int, aten.t.default) and rank > 1:
        one, other = (dim % rank for dim in dims or (0, 1))
        order[one], order[other] = other, one
    return [order.index(dim) for dim in range(rank)]


@rule(*NEW, behaviour=IN_PLACE)
def rename_in_place(operator: _torch.Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """It is the argument itself that gets another layout."""
    renamed = NEW[operator](*args, **kwargs)
    _torch.relocate(args[0], _torch.local_of(renamed), _torch.spec_of(renamed))
    return _torch.as_view(operator, args, kwargs, args[0])
