"""Filling some indices of a dimension: every rank knows all of them, and fills those that it owns."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor

from ... import _torch
from ...sharding.errors import Unfit
from ...sharding.implicit_replication import as_replicated
from ...sharding.layout import Layout
from ...sharding.plan_rule import Made, plan_rule
from ...sharding.registry import Behaviour
from .common import with_index
from .index_select import local_index

aten = torch.ops.aten

FILL = Behaviour(
    "all dimensions", "nothing; Partial inputs are reduced; all-gather of sharded indices",
    "a dimension that the input does not have",
)  # fmt: skip


def _constants(input: Any, dim: int, index: Any, value: Any) -> tuple[Any, ...]:
    """Make a plain index and a plain 0-d value replicated DTensors."""
    if isinstance(value, torch.Tensor) and not isinstance(value, DTensor) and not value.dim():
        value = as_replicated(value, input.device_mesh)
    return with_index(input, dim, index, value)


@plan_rule(
    aten.index_fill.int_Scalar, aten.index_fill.int_Tensor, aten.index_fill_.int_Scalar, aten.index_fill_.int_Tensor,
    behaviour=FILL, completes=_constants,
)  # fmt: skip
def index_fill(operator: _torch.Operator, input: Layout, dim: int, index: Layout, value: Any) -> Made:
    rank = max(1, input.ndim)
    if not -rank <= dim < rank:
        raise Unfit(f"the input has no dimension {dim}", "give a dimension that it has")
    dim %= rank
    size = input.shape[dim] if input.ndim else 1
    shape = [size if d == dim else 1 for d in range(input.ndim)]
    filling = aten.masked_fill_ if operator._schema.is_mutable else aten.masked_fill
    fill = filling.Tensor if isinstance(value, Layout) else filling.Scalar

    def run(input: DTensor, dim: int, index: DTensor, value: Any) -> Any:
        filled = local_index(index)
        mask = torch.zeros(size, dtype=torch.bool, device=filled.device).index_fill(0, filled, True)
        return fill(input, as_replicated(mask.view(shape), input.device_mesh), value)

    return run
