"""The layers over which `vmap` is measured."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class Layer:
    name: str
    channels: tuple[int, int]
    size: int
    kernel: int
    stride: int = 1
    groups: int = 1
    dims: int = 2
    transposed: bool = False
    batch: int | None = None
    dtype: torch.dtype = torch.float32
    threads: int | None = None  # as everywhere

    def module(self) -> nn.Module:
        plain = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
        kind = ((nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d) if self.transposed else plain)[
            self.dims - 1
        ]
        options = {"stride": self.stride, "padding": self.kernel // 2, "groups": self.groups, "bias": False}
        return kind(*self.channels, self.kernel, **options, dtype=self.dtype)

    def convolve(self, w: Tensor, x: Tensor) -> Tensor:
        plain = (F.conv1d, F.conv2d, F.conv3d)
        conv = ((F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d) if self.transposed else plain)[
            self.dims - 1
        ]
        return conv(x, w, stride=self.stride, padding=self.kernel // 2, groups=self.groups)

    def inputs(self, *lead: int) -> Tensor:
        return torch.randn(*lead, self.channels[0], *[self.size] * self.dims, dtype=self.dtype)

    def weights(self, *lead: int) -> Tensor:
        first, second = self.channels if self.transposed else reversed(self.channels)
        return torch.randn(*lead, first, second // self.groups, *[self.kernel] * self.dims, dtype=self.dtype)


LAYERS = (
    Layer("3->64 32x32 k3", (3, 64), 32, 3),
    Layer("64->64 32x32 k3", (64, 64), 32, 3),
    Layer("64->128 32x32 k3 s2", (64, 128), 32, 3, stride=2),
    Layer("256->256 8x8 k3", (256, 256), 8, 3),
    Layer("512->512 4x4 k3", (512, 512), 4, 3),
    Layer("64->256 16x16 k1", (64, 256), 16, 1),
    Layer("3->64 56x56 k7 s2", (3, 64), 56, 7, stride=2),
    Layer("depthwise 96 14x14 k7", (96, 96), 14, 7, groups=96),
    Layer("64->64 32x32 k3 groups 8", (64, 64), 32, 3, groups=8),
    Layer("3-d 16->32 12^3 k3", (16, 32), 12, 3, dims=3),
    Layer("1-d 64->128 256 k5", (64, 128), 256, 5, dims=1),
)

# Unlike any that were looked at when the algorithms and their costs were worked on.
OTHER_LAYERS = (
    Layer("32->40 24x24 k3", (32, 40), 24, 3),
    Layer("128->128 14x14 k3", (128, 128), 14, 3),
    Layer("24->24 40x40 k5", (24, 24), 40, 5),
    Layer("256->64 7x7 k1", (256, 64), 7, 1),
    Layer("16->16 28x28 k3 groups 4", (16, 16), 28, 3, groups=4),
    Layer("1-d 32->32 1000 k3", (32, 32), 1000, 3, dims=1),
    Layer("3-d 8->8 16^3 k3", (8, 8), 16, 3, dims=3),
    Layer("transposed 64->32 16x16 k4 s2", (64, 32), 16, 4, stride=2, transposed=True),
    Layer("128->128 14x14 k3, batch 4", (128, 128), 14, 3, batch=4),
    Layer("48->96 20x20 k3, batch 64", (48, 96), 20, 3, batch=64),
    Layer("96->96 12x12 k3, float64", (96, 96), 12, 3, dtype=torch.float64),
    Layer("96->96 12x12 k3, 1 thread", (96, 96), 12, 3, threads=1),
)
