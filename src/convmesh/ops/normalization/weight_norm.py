"""Weights as a direction and a length: a norm and a product, which have rules for everything."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor

from ... import _torch
from ...sharding.registry import Behaviour, composite, rule

aten = torch.ops.aten


@composite("_weight_norm")
def weight_norm(v: torch.Tensor, g: torch.Tensor, dim: int = 0) -> torch.Tensor:
    """torch has one fused operator for it, of which its DTensor knows the forward pass only."""
    if not isinstance(v, DTensor):
        result: torch.Tensor = _torch.composite(aten._weight_norm.default, (v, g, dim), {})
        return result
    # -1 does not count from the end here: one length for all of the weight.
    others = None if dim == -1 else tuple(other for other in range(v.dim()) if other != dim)
    length: torch.Tensor = torch.linalg.vector_norm(v, 2, others, keepdim=others is not None)
    return v * (g / length)


@rule(
    aten._weight_norm.default,
    behaviour=Behaviour("all dimensions", "nothing; all-reduce of the norms where a filter is cut"),
)
def weight_norm_in_inference_mode(operator: _torch.Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return weight_norm(*_torch.arguments(operator, args, kwargs))
