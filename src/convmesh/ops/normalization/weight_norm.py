"""Weights as a direction and a length: a norm and a product, which have rules for everything."""

from __future__ import annotations

import torch

from ...sharding.registry import Behaviour, composite

WEIGHT = Behaviour("all dimensions", "nothing; all-reduce of the norms where a filter is sharded")


@composite("_weight_norm", WEIGHT)
def weight_norm(v: torch.Tensor, g: torch.Tensor, dim: int = 0) -> torch.Tensor:
    """torch has one fused operator for it, of which its DTensor knows the forward pass only."""
    # -1 does not count from the end here: one length for all of the weight.
    others = None if dim == -1 else tuple(other for other in range(v.dim()) if other != dim)
    length: torch.Tensor = torch.linalg.vector_norm(v, 2, others, keepdim=others is not None)
    return v * (g / length)
