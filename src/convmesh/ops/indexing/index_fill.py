"""Filling some indices of a dimension: every rank knows all of them, and fills those that it has."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor

from ... import _torch
from ...sharding.errors import refuse
from ...sharding.implicit_replication import the_same_everywhere
from ...sharding.redistribute import specs_of
from ...sharding.registry import Behaviour, rule
from .index_select import local_index

aten = torch.ops.aten


@rule(
    aten.index_fill.int_Scalar, aten.index_fill.int_Tensor, aten.index_fill_.int_Scalar, aten.index_fill_.int_Tensor,
    behaviour=Behaviour("all dimensions", "nothing; Partial is reduced", "a wrong dimension"),
)  # fmt: skip
def index_fill(operator: _torch.Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> DTensor:
    input, dim, index, value = _torch.arguments(operator, args, kwargs)
    specs_of("index_fill", (("input", input),))
    rank = max(1, input.dim())
    if not -rank <= dim < rank:
        raise refuse("index_fill", f"the input has no dimension {dim}", (("input", input),), "give one that it has")
    dim %= rank
    size = int(input.shape[dim]) if input.dim() else 1
    filled = local_index(index)
    mask = torch.zeros(size, dtype=torch.bool, device=filled.device).index_fill(0, filled, True)
    shape = [size if d == dim else 1 for d in range(input.dim())]
    chosen = the_same_everywhere(mask.view(shape), input.device_mesh)
    filling = aten.masked_fill_ if operator._schema.is_mutable else aten.masked_fill
    kind = filling.Tensor if isinstance(value, torch.Tensor) else filling.Scalar
    result: DTensor = kind(input, chosen, value)
    return result
