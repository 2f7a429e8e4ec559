"""`tensor_split` at indices given as a tensor: their values are read, as torch itself does."""

from __future__ import annotations

import torch
from torch.distributed.tensor import DTensor

from ...sharding.registry import composite
from .slice_split import SPLIT


@composite("tensor_split.tensor_indices_or_sections", SPLIT)
def tensor_split(input: torch.Tensor, places: torch.Tensor, dim: int = 0) -> list[torch.Tensor]:
    numbers = places.full_tensor() if isinstance(places, DTensor) else places
    return list(torch.tensor_split(input, numbers.tolist(), dim))
