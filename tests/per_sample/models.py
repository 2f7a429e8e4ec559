"""Models whose per-sample gradients are hard to get: layers called twice, tied, by keyword, or not at all."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

B = 5


class Residual(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm = nn.GroupNorm(2, channels)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(x + self.norm(self.conv(x)), inplace=True)


class Twice(nn.Module):
    """One layer, called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 3, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(self.conv(x).sin()).flatten(1)


class Tied(nn.Module):
    """Two layers, one weight; and a parameter that no layer owns."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 3, 3, padding=1), nn.Conv2d(3, 3, 3, padding=1)
        self.second.weight = self.first.weight
        self.scale = nn.Parameter(torch.ones(3, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        return (self.second(self.first(x)) * self.scale).flatten(1)


class ByKeyword(nn.Module):
    """Layers that are called with keywords; a weight that one layer holds, and another call uses as well."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 4, 3, stride=2), nn.BatchNorm2d(4).eval()
        self.up, self.head = nn.ConvTranspose2d(4, 4, 3, stride=2), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.up(self.norm(input=self.conv(input=x)), output_size=x.shape[2:])
        return F.linear(self.head(y.mean((2, 3))).tanh(), self.head.weight).repeat(1, 3)


def network() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.InstanceNorm2d(8, affine=True),
        nn.ReLU(inplace=True),
        nn.Conv2d(8, 8, 3, groups=8, padding="same", padding_mode="circular"),
        Residual(8),
        nn.ConvTranspose2d(8, 6, 2, stride=2),
        nn.Conv2d(6, 32, 5, stride=4, groups=2),
        nn.Conv2d(32, 64, 3),
        nn.Dropout(0.0),
        nn.Flatten(2),
        nn.Linear(4, 7),
        nn.LayerNorm(7),
        nn.Flatten(),
        nn.Linear(64 * 7, 10),
    )


def text() -> nn.Module:
    return nn.Sequential(nn.Embedding(7, 6, padding_idx=2), nn.Linear(6, 4), nn.Tanh(), nn.Flatten(), nn.Linear(20, 10))


def images() -> Tensor:
    return torch.randn(B, 3, 10, 10).double()


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "network": (network, images),
    "text": (text, lambda: torch.randint(0, 7, (B, 5))),
    "one layer twice": (Twice, images),
    "tied weights": (Tied, images),
    "keywords, and a weight used beside its layer": (ByKeyword, images),
}
