"""ResNet (He et al., 2015) with the stride in the 3x3 convolution, in any number of spatial dimensions."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from .layers import BATCH_NORMS, CONVOLUTIONS, MAX_POOLS, GlobalAverage, layer_for_dims


def _convolution(inputs: int, outputs: int, kernel: int, stride: int, spatial_dims: int) -> list[nn.Module]:
    """Return a convolution without a bias, which the norm would cancel, and a batch norm."""
    convolution, norm = layer_for_dims(CONVOLUTIONS, spatial_dims), layer_for_dims(BATCH_NORMS, spatial_dims)
    return [convolution(inputs, outputs, kernel, stride, kernel // 2, bias=False), norm(outputs)]


class Residual(nn.Module):
    """`relu(branch(x) + x)`; a 1x1 convolution brings `x` to the shape of the branch if that differs."""

    def __init__(self, branch: nn.Module, inputs: int, outputs: int, stride: int, spatial_dims: int):
        super().__init__()
        self.branch = branch
        same = inputs == outputs and stride == 1
        self.shortcut = nn.Sequential(*([] if same else _convolution(inputs, outputs, 1, stride, spatial_dims)))
        self.activation = nn.ReLU(inplace=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.activation(self.branch(x) + self.shortcut(x))
        return y


def basic(inputs: int, width: int, stride: int, spatial_dims: int) -> Residual:
    """Two 3x3 convolutions: the block of the shallower networks."""
    branch = [
        *_convolution(inputs, width, 3, stride, spatial_dims),
        nn.ReLU(inplace=True),
        *_convolution(width, width, 3, 1, spatial_dims),
    ]
    return Residual(nn.Sequential(*branch), inputs, width, stride, spatial_dims)


def bottleneck(inputs: int, width: int, stride: int, spatial_dims: int) -> Residual:
    """A 3x3 convolution on a quarter of the output channels, between two 1x1 convolutions."""
    branch = [
        *_convolution(inputs, width, 1, 1, spatial_dims),
        nn.ReLU(inplace=True),
        *_convolution(width, width, 3, stride, spatial_dims),
        nn.ReLU(inplace=True),
        *_convolution(width, 4 * width, 1, 1, spatial_dims),
    ]
    return Residual(nn.Sequential(*branch), inputs, 4 * width, stride, spatial_dims)


class ResNet(nn.Module):
    """A ResNet with `depths[i]` residual blocks in stage `i`, whose width is `width * 2**i`."""

    def __init__(
        self,
        depths: Sequence[int],
        *,
        use_bottleneck: bool = False,
        num_classes: int = 1000,
        in_channels: int = 3,
        width: int = 64,
        spatial_dims: int = 2,
    ):
        super().__init__()
        block, expansion = (bottleneck, 4) if use_bottleneck else (basic, 1)
        pool = layer_for_dims(MAX_POOLS, spatial_dims)
        stem = _convolution(in_channels, width, 7, 2, spatial_dims)
        self.stem = nn.Sequential(*stem, nn.ReLU(inplace=True), pool(3, 2, 1))
        stages = []
        channels = width
        for number, depth in enumerate(depths):
            blocks = []
            for index in range(depth):
                blocks.append(block(channels, width << number, 2 if number and not index else 1, spatial_dims))
                channels = (width << number) * expansion
            stages.append(nn.Sequential(*blocks))
        self.stages = nn.Sequential(*stages)
        self.head = nn.Sequential(GlobalAverage(), nn.Linear(channels, num_classes))
        self._init_weights()

    def _init_weights(self) -> None:
        for module in self.modules():
            if isinstance(module, CONVOLUTIONS):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.head(self.stages(self.stem(x)))
        return y


def resnet18(num_classes: int = 1000, in_channels: int = 3, width: int = 64, spatial_dims: int = 2) -> ResNet:
    return ResNet(
        (2, 2, 2, 2), num_classes=num_classes, in_channels=in_channels, width=width, spatial_dims=spatial_dims
    )


def resnet50(num_classes: int = 1000, in_channels: int = 3, width: int = 64, spatial_dims: int = 2) -> ResNet:
    return ResNet(
        (3, 4, 6, 3),
        use_bottleneck=True,
        num_classes=num_classes,
        in_channels=in_channels,
        width=width,
        spatial_dims=spatial_dims,
    )
