"""Medians of all values, and quantiles: sorted, and then single places of that."""

from __future__ import annotations

from math import ceil, floor
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Shard

from .. import _torch
from ..sharding.registry import composite, rule
from .ordered import SORTED

aten = torch.ops.aten


@rule(aten.median.default, behaviour=SORTED)
def median(operator: _torch.Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Of all values: the lower of those in the middle, NaN if there is one."""
    (input,) = args
    if _torch.tracing() or not any(isinstance(p, Shard) for p in input.placements) or not input.numel():
        return _torch.stock(operator, args, kwargs)
    ranked, _ = aten.sort.default(aten.view.default(aten.clone.default(input), [input.numel()]), 0)
    middle = aten.select.int(ranked, 0, (input.numel() - 1) // 2)
    if not input.dtype.is_floating_point:
        return middle
    last = aten.select.int(ranked, 0, -1)
    return aten.where.self(aten.isnan.default(last), last, middle)


@composite("quantile.scalar")
def quantile_of_number(
    input: torch.Tensor, q: float, dim: int | None = None, keepdim: bool = False, *, interpolation: str = "linear"
) -> torch.Tensor:
    if not isinstance(input, DTensor):
        operator, given = aten.quantile.scalar, (input, q, dim, keepdim)
        result: torch.Tensor = _torch.composite(operator, given, {"interpolation": interpolation})
        return result
    return _quantile(input, torch.tensor(q, dtype=input.dtype), dim, keepdim, interpolation)


@composite("quantile")
def quantile(
    input: torch.Tensor, q: torch.Tensor, dim: int | None = None, keepdim: bool = False, *,
    interpolation: str = "linear",
) -> torch.Tensor:  # fmt: skip
    """[..., n, ...] [k] -> [k, ...]"""
    if not isinstance(input, DTensor):
        operator, given = aten.quantile.default, (input, q, dim, keepdim)
        result: torch.Tensor = _torch.composite(operator, given, {"interpolation": interpolation})
        return result
    wanted = q.full_tensor() if isinstance(q, DTensor) else q
    if not wanted.dim():
        return _quantile(input, wanted, dim, keepdim, interpolation)
    return torch.stack([_quantile(input, one, dim, keepdim, interpolation) for one in wanted])


def _quantile(
    input: torch.Tensor, q: torch.Tensor, dim: int | None, keepdim: bool, interpolation: str
) -> torch.Tensor:
    """NaN where there is one among the values."""
    if not bool((q >= 0) & (q <= 1)):
        raise RuntimeError(f"quantile() q values must be in the range [0, 1], and not {float(q)}")
    row = input.flatten() if dim is None else input
    along = 0 if dim is None else dim
    ranked = row.sort(along)[0]
    place = float(q * (row.shape[along] - 1))
    low, high = ranked.select(along, floor(place)), ranked.select(along, ceil(place))
    weight = {"linear": place - floor(place), "lower": 0.0, "higher": 1.0, "midpoint": 0.5,
              "nearest": float(round(place) - floor(place))}[interpolation]  # fmt: skip
    value = torch.lerp(low, high, 0.5 if interpolation == "midpoint" and low is not high else weight)
    last = ranked.select(along, -1)
    value = torch.where(last.isnan(), last, value)
    if not keepdim:
        return value
    return value.view([1] * input.dim()) if dim is None else value.unsqueeze(dim)
