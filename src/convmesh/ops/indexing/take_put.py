"""`take` and `put`: reading and writing single elements by their flat index into the full tensor."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor

from ... import _torch
from ...sharding.plan_rule import Made, plan_rule
from ...sharding.registry import Behaviour
from .common import with_index
from .index_select import local_index

aten = torch.ops.aten


def _indices_by_dim(shape: tuple[int, ...], index: Any) -> list[torch.Tensor]:
    """Return the index along each dimension for flat indices into a tensor of `shape`."""
    flat = local_index(index)
    count = torch.Size(shape).numel()
    if not _torch.tracing() and bool(((flat < -count) | (flat >= count)).any()):
        raise IndexError(f"index out of range for a tensor of shape {shape}, which has {count} elements")
    return list(torch.unravel_index(torch.where(flat < 0, flat + count, flat), shape))


def _at_least_1d(input: DTensor) -> DTensor:
    """Return the input, as 1-d if it is 0-d."""
    return input if input.dim() else aten.unsqueeze.default(input, 0)


def _with_index(input: Any, index: Any, *rest: Any) -> tuple[Any, ...]:
    input, _, *arguments = with_index(input, 0, index, *rest)
    return input, *arguments


@plan_rule(
    aten.take.default, behaviour=Behaviour(
        "all dimensions; the result is Partial(sum) where the input was sharded",
        "nothing; all-gather of sharded indices",
    ),
    completes=_with_index,
)  # fmt: skip
def take(operator: _torch.Operator, *_: Any) -> Made:
    return _take


def _take(input: DTensor, index: DTensor) -> Any:
    source = _at_least_1d(input)
    return aten.index.Tensor(source, _indices_by_dim(tuple(source.shape), index))


@plan_rule(
    aten.put.default, behaviour=Behaviour("all dimensions", "all-gather of sharded indices and values"),
    completes=_with_index,
)  # fmt: skip
def put(operator: _torch.Operator, *_: Any) -> Made:
    return _put


def _put(input: DTensor, index: DTensor, values: DTensor, adds: bool) -> Any:
    target, values = _at_least_1d(input), aten.view.default(values, list(index.shape))
    written = aten.index_put.default(target, _indices_by_dim(tuple(target.shape), index), values, adds)
    return written if input.dim() else aten.squeeze.dim(written, 0)
