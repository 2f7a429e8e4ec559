"""U-Net (Ronneberger et al., 2015) with strided convolutions, in any number of spatial dimensions."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from .layers import CONVOLUTIONS, INSTANCE_NORMS, TRANSPOSED, layer_for_dims


def _convolutions(inputs: int, outputs: int, stride: int, count: int, spatial_dims: int) -> nn.Sequential:
    """Return `count` convolutions, each with instance norm and activation; the first has the stride."""
    convolution, norm = layer_for_dims(CONVOLUTIONS, spatial_dims), layer_for_dims(INSTANCE_NORMS, spatial_dims)
    layers: list[nn.Module] = []
    for number in range(count):
        layers += [
            convolution(outputs if number else inputs, outputs, 3, 1 if number else stride, 1, bias=False),
            norm(outputs, affine=True),
            nn.SiLU(),
        ]
    return nn.Sequential(*layers)


class Level(nn.Module):
    """Downsample by `stride`, apply the levels `below`, upsample, and concatenate with the input."""

    def __init__(self, above: int, channels: int, below: nn.Module, stride: int, convs: int, spatial_dims: int):
        super().__init__()
        self.down = _convolutions(above, channels, stride, convs, spatial_dims)
        self.below = below
        self.up = layer_for_dims(TRANSPOSED, spatial_dims)(channels, above, 3, stride, 1)
        self.join = _convolutions(2 * above, above, 1, convs, spatial_dims)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.below(self.down(x))
        # Several sizes have the same downsampled size, so it is given: the network accepts inputs of any size.
        up = self.up(y, output_size=x.shape[2:])
        z: torch.Tensor = self.join(torch.cat([x, up], 1))
        return z


class UNet(nn.Module):
    """A U-Net with `channels` per level (from the top), `strides` between levels, and `convs` convolutions per side."""

    def __init__(
        self,
        spatial_dims: int,
        in_channels: int,
        out_channels: int,
        channels: Sequence[int],
        strides: Sequence[int],
        *,
        convs: int = 2,
    ):
        super().__init__()
        if len(strides) != len(channels) - 1:
            raise ValueError(
                f"`strides` (={tuple(strides)}) must have one entry less than `channels` (={tuple(channels)})"
            )
        self.entry = _convolutions(in_channels, channels[0], 1, convs, spatial_dims)
        levels: nn.Module = nn.Identity()
        for above, here, stride in reversed(list(zip(channels[:-1], channels[1:], strides, strict=True))):
            levels = Level(above, here, levels, stride, convs, spatial_dims)
        self.levels = levels
        self.exit = layer_for_dims(CONVOLUTIONS, spatial_dims)(channels[0], out_channels, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.exit(self.levels(self.entry(x)))
        return y
