"""`tensor_split` at places that a tensor names: its numbers are read, as torch itself does."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor

from ... import _torch
from ...sharding.registry import Behaviour, composite, rule

aten = torch.ops.aten


@composite("tensor_split.tensor_indices_or_sections")
def tensor_split(input: torch.Tensor, places: torch.Tensor, dim: int = 0) -> list[torch.Tensor]:
    if not isinstance(input, DTensor) and not isinstance(places, DTensor):
        parts: list[torch.Tensor] = _torch.composite(
            aten.tensor_split.tensor_indices_or_sections, (input, places, dim), {}
        )
        return parts
    numbers = places.full_tensor() if isinstance(places, DTensor) else places
    return list(torch.tensor_split(input, numbers.tolist(), dim))


@rule(
    aten.tensor_split.tensor_indices_or_sections,
    behaviour=Behaviour("all dimensions, pending sums", "what changes its owner, for each part"),
)
def tensor_split_in_inference_mode(operator: _torch.Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return tensor_split(*_torch.arguments(operator, args, kwargs))
