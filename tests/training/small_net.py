"""A small network with everything that is awkward to distribute, and its training steps."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

import convmesh
from tests.compare import assert_close

NAMES = ("data", "h", "w")


class Net(nn.Module):
    """A shared, a frozen and an unused parameter, a buffer; constants, an index, random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1, bias=False)  # before a norm its gradient is rounding
        self.norm = nn.BatchNorm2d(8)
        self.left = nn.Conv2d(8, 8, 3, padding=1)
        self.right = nn.Conv2d(8, 8, 3, padding=1)
        self.right.weight = self.left.weight
        self.frozen = nn.Conv2d(8, 8, 1).requires_grad_(False)
        self.unused = nn.Linear(3, 3)
        self.head = nn.Conv2d(8, 2, 1)
        self.register_buffer("scale", torch.linspace(0.5, 1.5, 8).view(1, 8, 1, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.norm(self.stem(x)))
        x = self.left(x) + self.right(x.flip(3))
        rows = torch.linspace(-1, 1, x.shape[2], dtype=x.dtype, device=x.device)
        x = x * rows[:, None] + rows.square().view(1, 1, -1, 1) * self.scale
        x = F.dropout2d(x, 0.2, self.training)
        if self.training:  # drops whole samples: random numbers that are drawn as a plain tensor
            x = x * (torch.rand(x.shape[0], 1, 1, 1, device=x.device) < 0.9)
        order = torch.tensor([1, 0, 3, 2, 5, 4, 7, 6], device=x.device)
        return self.head(self.frozen(x)[:, order])


def data(step: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(4, 3, 9, 10, generator=generator, dtype=torch.float64)
    return x, torch.randint(2, (4, 9, 10), generator=generator)


def build(mesh: DeviceMesh | None, seed: int = 0, **options: Any) -> nn.Module:
    torch.manual_seed(seed)
    model = Net().double()
    return model if mesh is None else convmesh.distribute(model, mesh, **options)


def loss_of(model: nn.Module, mesh: DeviceMesh | None, dims: dict[str, int], step: int = 0) -> torch.Tensor:
    x, target = data(step)
    if mesh is not None:
        x = convmesh.shard(x, mesh, **dims)
        target = convmesh.shard(target, mesh, **{name: max(0, dim - 1) for name, dim in dims.items()})
    return F.cross_entropy(model(x), target)


def assert_same_gradients(model: nn.Module, expected: nn.Module) -> None:
    for (name, actual), wanted in zip(model.named_parameters(), expected.parameters(), strict=True):
        if wanted.grad is None:
            assert actual.grad is None, name
            continue
        gradient = actual.grad
        assert isinstance(gradient, DTensor), name
        assert all(isinstance(placement, Replicate) for placement in gradient.placements), (name, gradient.placements)
        try:
            assert_close(gradient.to_local(), wanted.grad)
        except AssertionError as error:
            raise AssertionError(f"{name}: {error}") from None


def once(model: nn.Module, mesh: Any, dims: dict[str, int]) -> None:
    loss_of(model, mesh, dims).backward()
