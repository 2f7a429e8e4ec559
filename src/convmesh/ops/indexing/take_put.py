"""Single places of a tensor by their numbers, counted over all of it: `take`, and `put`, which writes there."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor

from ... import _torch
from ...sharding.redistribute import specs_of
from ...sharding.registry import Behaviour, rule
from .index_select import local_index

aten = torch.ops.aten


def _places(shape: tuple[int, ...], index: Any) -> list[torch.Tensor]:
    """The index along each dimension of places that are counted over all of them."""
    flat = local_index(index)
    count = torch.Size(shape).numel()
    if not _torch.tracing() and bool(((flat < -count) | (flat >= count)).any()):
        raise IndexError(f"a tensor of shape {shape} does not have all of the places that are asked for")
    return list(torch.unravel_index(torch.where(flat < 0, flat + count, flat), shape))


@rule(aten.take.default, behaviour=Behaviour("nothing", "nothing: along sharded dimensions Partial(sum)"))
def take(operator: _torch.Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> DTensor:
    input, index = _torch.arguments(operator, args, kwargs)
    specs_of("take", (("input", input),))
    seen = input if input.dim() else aten.unsqueeze.default(input, 0)
    taken: DTensor = aten.index.Tensor(seen, _places(tuple(seen.shape), index))
    return taken


@rule(aten.put.default, behaviour=Behaviour("all dimensions", "values that are sharded are replicated"))
def put(operator: _torch.Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> DTensor:
    input, index, values, adds = _torch.arguments(operator, args, kwargs)
    specs_of("put", (("input", input), ("values", values)))
    seen = input if input.dim() else aten.unsqueeze.default(input, 0)
    given = aten.view.default(values, list(index.shape))
    written: DTensor = aten.index_put.default(seen, _places(tuple(seen.shape), index), given, adds)
    return written if input.dim() else aten.squeeze.dim(written, 0)
