"""A program: the tensors that it begins with, and its lines."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

MESHES = [(2,), (3,), (4,), (2, 2), (1, 4)]
LARGER_MESHES = [(5,), (8,), (2, 3), (2, 2, 2), (1, 2, 4)]  # of simulated ranks


@dataclass(frozen=True)
class Leaf:
    """A tensor that a program begins with: numbers, `true` or false, or indices below a number; and where it lies."""

    name: str
    shape: tuple[int, ...]
    at: tuple[Any, ...]
    kind: str | int = "numbers"

    def values(self) -> torch.Tensor:
        generator = torch.Generator().manual_seed(sum(map(ord, self.name)) + len(self.shape))
        if self.kind == "numbers":
            return torch.randn(self.shape, generator=generator, dtype=torch.float64)
        if self.kind == "true":
            return torch.rand(self.shape, generator=generator) > 0.4
        return torch.randint(int(self.kind), self.shape, generator=generator)


@dataclass(frozen=True)
class Program:
    mesh: tuple[int, ...]
    leaves: tuple[Leaf, ...]
    lines: tuple[str, ...]  # each gives a value to a name, or writes into one

    def __repr__(self) -> str:
        return "\n".join([f"mesh {self.mesh}", *map(str, self.leaves), *self.lines])

    def function(self, mode: str) -> Callable[..., list[torch.Tensor]]:
        """Of the leaves, what every line made; copies of it in compiled code, which has random numbers of its own."""
        results = [line.split(" = ")[0] for line in self.lines]
        head = f"def run({', '.join(leaf.name for leaf in self.leaves)}):"
        copied = " * 1" if mode == "compiled" else ""
        tail = f"return [{', '.join(f'{name}{copied}' for name in results)}]"
        names: dict[str, Any] = {"torch": torch, "F": F}
        exec("\n    ".join([head, *self.lines, tail]), names)
        function: Callable[..., list[torch.Tensor]] = names["run"]
        return function
