"""ConvNeXt (Liu et al., 2022), in any number of spatial dimensions."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from .layers import CONVOLUTIONS, GlobalAverage, StochasticDepth, layer_for_dims

EPSILON = 1e-6


class ChannelNorm(nn.LayerNorm):
    """A layer norm over the channels of (N, C, ...)."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.movedim(1, -1)).movedim(-1, 1)


class Block(nn.Module):
    """A depthwise 7x7 convolution, then an MLP per pixel, added to the input."""

    def __init__(self, channels: int, spatial_dims: int, layer_scale: float, stochastic_depth: float):
        super().__init__()
        convolution = layer_for_dims(CONVOLUTIONS, spatial_dims)
        self.depthwise = convolution(channels, channels, 7, padding=3, groups=channels)
        self.norm = nn.LayerNorm(channels, eps=EPSILON)
        self.perceptron = nn.Sequential(nn.Linear(channels, 4 * channels), nn.GELU(), nn.Linear(4 * channels, channels))
        self.layer_scale = nn.Parameter(torch.full((channels,), layer_scale))
        self.stochastic_depth = StochasticDepth(stochastic_depth)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.depthwise(x).movedim(1, -1)  # Linear and LayerNorm need channels last
        y = self.layer_scale * self.perceptron(self.norm(y))
        z: torch.Tensor = x + self.stochastic_depth(y.movedim(-1, 1))
        return z


class ConvNeXt(nn.Module):
    """A ConvNeXt with `depths[i]` blocks of `dims[i]` channels in stage `i`, after a stem of `patch` x `patch` pixels.

    `stochastic_depth` is the drop probability of the last block; it grows linearly from 0 at the first.
    """

    def __init__(
        self,
        depths: Sequence[int] = (3, 3, 9, 3),
        dims: Sequence[int] = (96, 192, 384, 768),
        *,
        num_classes: int = 1000,
        in_channels: int = 3,
        patch: int = 4,
        layer_scale: float = 1e-6,
        stochastic_depth: float = 0.0,
        spatial_dims: int = 2,
    ):
        super().__init__()
        if len(depths) != len(dims):
            raise ValueError(f"`depths` (={tuple(depths)}) and `dims` (={tuple(dims)}) must be of one length")
        convolution = layer_for_dims(CONVOLUTIONS, spatial_dims)
        last = max(1, sum(depths) - 1)
        probabilities = iter([stochastic_depth * number / last for number in range(sum(depths))])
        stages: list[nn.Module] = []
        channels = in_channels
        for number, (depth, dim) in enumerate(zip(depths, dims, strict=True)):
            if number == 0:
                entry = [convolution(channels, dim, patch, stride=patch), ChannelNorm(dim, eps=EPSILON)]
            else:
                entry = [ChannelNorm(channels, eps=EPSILON), convolution(channels, dim, 2, stride=2)]
            blocks = [Block(dim, spatial_dims, layer_scale, next(probabilities)) for _ in range(depth)]
            stages.append(nn.Sequential(*entry, *blocks))
            channels = dim
        self.stages = nn.Sequential(*stages)
        self.head = nn.Sequential(
            GlobalAverage(), nn.LayerNorm(channels, eps=EPSILON), nn.Linear(channels, num_classes)
        )
        self._init_weights()

    def _init_weights(self) -> None:
        for module in self.modules():
            if isinstance(module, (nn.Linear, *CONVOLUTIONS)):
                nn.init.trunc_normal_(module.get_parameter("weight"), std=0.02)
                nn.init.zeros_(module.get_parameter("bias"))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.head(self.stages(x))
        return y


def convnext_tiny(num_classes: int = 1000, in_channels: int = 3, stochastic_depth: float = 0.1) -> ConvNeXt:
    return ConvNeXt(num_classes=num_classes, in_channels=in_channels, stochastic_depth=stochastic_depth)


def convnext_small(num_classes: int = 1000, in_channels: int = 3, stochastic_depth: float = 0.4) -> ConvNeXt:
    return ConvNeXt((3, 3, 27, 3), num_classes=num_classes, in_channels=in_channels, stochastic_depth=stochastic_depth)
