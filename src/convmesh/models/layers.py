"""torch.nn's layers by number of spatial dimensions, and modules that several networks share."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

CONVOLUTIONS: tuple[type[Any], ...] = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
TRANSPOSED: tuple[type[Any], ...] = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
BATCH_NORMS: tuple[type[Any], ...] = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
INSTANCE_NORMS: tuple[type[Any], ...] = (nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)
MAX_POOLS: tuple[type[Any], ...] = (nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d)


def layer_for_dims(layers: tuple[type[Any], ...], spatial_dims: int) -> type[Any]:
    """Return the layer for 1, 2 or 3 spatial dimensions."""
    if not 1 <= spatial_dims <= len(layers):
        raise ValueError(f"`spatial_dims` (={spatial_dims}) must be between 1 and {len(layers)}")
    return layers[spatial_dims - 1]


class GlobalAverage(nn.Module):
    """The mean over all spatial dimensions: `(N, C, ...) -> (N, C)`."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.mean(tuple(range(2, x.dim())))


class StochasticDepth(nn.Module):
    """In training, drops a residual branch for whole samples, and scales the others up to keep the mean."""

    def __init__(self, probability: float):
        super().__init__()
        if not 0 <= probability < 1:
            raise ValueError(f"`probability` (={probability}) must be at least 0 and below 1")
        self.probability = probability

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.training or self.probability == 0:
            return x
        kept = 1 - self.probability
        mask = x.new_empty([x.shape[0]] + [1] * (x.dim() - 1)).bernoulli_(kept)
        return x * mask / kept

    def extra_repr(self) -> str:
        return f"probability={self.probability}"
