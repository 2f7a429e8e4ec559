"""The median of all values, and quantiles: sort, then select."""

from __future__ import annotations

from math import ceil, floor, prod
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from ... import _torch
from ...sharding.layout import Layout
from ...sharding.plan_rule import Made, plan_rule
from ...sharding.registry import composite
from .._core.index_bounds import can_route
from .sort_topk import SORTED

aten = torch.ops.aten


@plan_rule(aten.median.default, behaviour=SORTED, asks=can_route, foreign=True)
def median(operator: _torch.Operator, input: Layout, routes: bool) -> Made | None:
    """The median of all values: the lower of the two in the middle; NaN if any value is NaN."""
    return _median if routes and input.sharded_dims and prod(input.shape) else None


def _median(input: DTensor) -> Any:
    ranked, _ = aten.sort.default(aten.view.default(aten.clone.default(input), [input.numel()]), 0)
    middle = aten.select.int(ranked, 0, (input.numel() - 1) // 2)
    if not input.dtype.is_floating_point:
        return middle
    last = aten.select.int(ranked, 0, -1)
    return aten.where.self(aten.isnan.default(last), last, middle)


@composite("quantile.scalar", SORTED)
def quantile_of_number(
    input: torch.Tensor, q: float, dim: int | None = None, keepdim: bool = False, *, interpolation: str = "linear"
) -> torch.Tensor:
    return _quantile(input, torch.tensor(q, dtype=input.dtype), dim, keepdim, interpolation)


@composite("quantile", SORTED)
def quantile(
    input: torch.Tensor, q: torch.Tensor, dim: int | None = None, keepdim: bool = False, *,
    interpolation: str = "linear",
) -> torch.Tensor:  # fmt: skip
    """`[..., n, ...] [k] -> [k, ...]`"""
    if not q.dim():
        return _quantile(input, q, dim, keepdim, interpolation)
    found = [_quantile(input, one, dim, keepdim, interpolation) for one in q.unbind()]
    return torch.stack(found, -1).movedim(-1, 0)  # the strides that one device returns


def _quantile(input: torch.Tensor, q: torch.Tensor, dim: int | None, keepdim: bool, interpolation: str) -> torch.Tensor:
    """Return one quantile; NaN where any value is NaN."""
    value = float(q.full_tensor().detach() if isinstance(q, DTensor) else q.detach())
    if not 0 <= value <= 1:
        raise RuntimeError(f"quantile() q values must be in the range [0, 1], and not {value}")
    row = input.flatten() if dim is None else input
    along = 0 if dim is None else dim
    ranked = row.sort(along)[0]
    place = q * (row.shape[along] - 1)
    # In the dtype of q, so that it is rounded as on one device.
    at = float(torch.tensor(value, dtype=q.dtype) * (row.shape[along] - 1))
    near = {"lower": floor(at), "higher": ceil(at), "nearest": round(at)}
    if interpolation in near:
        value_at = ranked.select(along, near[interpolation])
    else:
        low, high = ranked.select(along, floor(at)), ranked.select(along, ceil(at))
        value_at = torch.lerp(low, high, place - floor(at) if interpolation == "linear" else 0.5)
    last = ranked.select(along, -1)
    value_at = torch.where(last.isnan(), last, value_at)
    if not keepdim:
        return value_at
    return value_at.view([1] * input.dim()) if dim is None else value_at.unsqueeze(dim)
