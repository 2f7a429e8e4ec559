"""Views in which dimensions change places or new ones come in, or numbers get another meaning, as pairs for complex
ones: every rank looks at its own part.

torch's DTensor does the same, but not in inference mode for tensors that were made outside of it, such as a model's
parameters, and not in place, which torch's own formulas of gradients use.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor.placement_types import Shard

from ... import _torch
from ...sharding.layout import Layout, is_plain
from ...sharding.local_views import local_view_rule
from ...sharding.plan_cache import planned
from ...sharding.registry import Behaviour, rule, tolerant
from .slice_split import view_of

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


def _local(operator: _torch.Operator, spec: _torch.Spec, *dims: Any) -> Layout | None:
    output = plan_rename(operator, spec, dims[0] if operator is aten.permute.default else dims)
    return output if output is not None and output.present else None


@local_view_rule(
    aten.permute.default, aten.transpose.int, aten.t.default, aten.unsqueeze.default, behaviour=RENAME, where=_local
)
@rule(
    aten.view_as_real.default, aten.view_as_complex.default, aten._conj.default, aten._neg_view.default,
    behaviour=RENAME, knows_strides=True,
)  # fmt: skip
def rename(operator: _torch.Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    input, *dims = _torch.arguments(operator, args, kwargs)
    given = tuple(dims[0]) if operator is aten.permute.default else tuple(dims)
    output = plan_rename(operator, _torch.spec_of(input), given)
    if output is None:
        return _torch.stock(operator, args, kwargs)
    local = _torch.local_of(input)
    if not output.present:
        return _torch.wrap(local.new_empty(0, dtype=output.dtype), output.spec)
    if operator is aten.view_as_real.default and local.is_conj():
        return _torch.wrap(operator(local.resolve_conj()), output.spec)  # of a DTensor, nobody sees that it is one
    return view_of(operator, args, kwargs, output)


_renamed = tolerant(rename)


@rule(aten.detach.default, aten.alias.default, behaviour=RENAME, knows_strides=True, tolerates=True)
def itself(operator: _torch.Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What autograd saves of the results of operators is detached when it is saved, and again when it is used."""
    view = _torch.view_of_itself(operator, args[0])
    return _renamed(operator, args, kwargs) if view is None else view


@planned
def plan_rename(operator: _torch.Operator, spec: _torch.Spec, dims: tuple[int, ...]) -> Layout | None:
    """Where the result lies; None where only torch's DTensor knows, or complains."""
    layout = Layout.of(spec)
    if not _torch.plain_order(spec) or not all(map(is_plain, layout.placements)):
        return None
    try:
        with _torch.no_modes():
            full = torch.empty_strided(layout.shape, layout.stride, dtype=layout.dtype, device="meta")
            viewed = operator(full, dims) if operator is aten.permute.default else operator(full, *dims)
    except (RuntimeError, IndexError):
        return None
    places = _places(operator, len(layout.shape), dims)
    placements = tuple(Shard(places[p.dim]) if isinstance(p, Shard) else p for p in layout.placements)
    if any(isinstance(p, Shard) and p.dim >= viewed.dim() for p in placements):
        return None  # the pairs of complex numbers themselves are sharded
    return Layout(layout.mesh, placements, tuple(viewed.shape), viewed.stride(), viewed.dtype)


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
    renamed = NEW[operator](*args, **kwargs)
    _torch.relocate(args[0], _torch.local_of(renamed), _torch.spec_of(renamed))
    return _torch.as_view(operator, args, kwargs, args[0])
