"""Constants of a plan as tensors: created once per device and dtype, not on every call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ... import _torch


class Constant:
    """1-d values that local computations index or multiply with, as one tensor per device and dtype."""

    def __init__(self, values: Sequence[Any]):
        self.values = tuple(values)
        self._cached: dict[tuple[torch.device, torch.dtype], torch.Tensor] = {}

    def on(self, device: torch.device, dtype: torch.dtype = torch.int64) -> torch.Tensor:
        """Return the values as a tensor on `device`. It is cached, except while a compiler traces."""
        if _torch.tracing():  # tensors made while tracing must not be cached
            return torch.tensor(self.values, dtype=dtype, device=device)
        tensor = self._cached.get((device, dtype))
        if tensor is None:
            with torch.inference_mode(False):
                tensor = self._cached[device, dtype] = torch.tensor(self.values, dtype=dtype, device=device)
        return tensor

    def along(self, dim: int, like: torch.Tensor) -> torch.Tensor:
        """Return the values in the dtype of `like`, shaped to be multiplied with it along `dim`."""
        shape = [1] * like.dim()
        shape[dim] = len(self.values)
        return self.on(like.device, like.dtype).view(shape)
