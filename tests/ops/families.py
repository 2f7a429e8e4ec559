"""The functions of `convmesh selftest`, one of every family, with what one process makes of them."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from convmesh.selftest.functions import ALL_FUNCTIONS as ALL_FUNCTIONS
from convmesh.selftest.functions import FUNCTIONS as FUNCTIONS
from convmesh.selftest.functions import SHAPE as SHAPE
from tests.cases import place, places_of


class Example:
    """A function, its tensors, and what one process makes of them."""

    def __init__(self, name: str) -> None:
        self.function, shapes = ALL_FUNCTIONS[name]
        generator = torch.Generator().manual_seed(3)
        self.tensors = [torch.randn(shape, dtype=torch.float64, generator=generator) for shape in (SHAPE, *shapes)]
        dense = [tensor.clone().requires_grad_() for tensor in self.tensors]
        self.expected = self.function(*dense)
        self.seed = torch.randn(self.expected.shape, dtype=torch.float64, generator=generator)
        self.gradients = self.backward(self.expected, dense)

    def placed(self, mesh: DeviceMesh) -> list[Any]:
        at: list[Any] = [2, *["R"] * (len(self.tensors) - 1)]
        return [place(tensor, mesh, (p,)).requires_grad_() for tensor, p in zip(self.tensors, at, strict=True)]

    def backward(self, output: torch.Tensor, leaves: list[Any]) -> tuple[Any, ...]:
        """A number has a gradient of 1, and everything else numbers of its own."""
        seed = self.seed
        if isinstance(output, DTensor):
            seed = place(seed, output.device_mesh, places_of(output))
        return torch.autograd.grad(output, leaves, seed if output.dim() else None)
