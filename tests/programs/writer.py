"""Writing a random program, line by line."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from tests.programs.check import gradients
from tests.programs.program import Leaf

EMPTY = 0.1  # of all programs may have tensors without elements
MOST = 2000  # elements of any tensor
LARGEST = 1e3


class Writer:
    """Writes a program by running it in one process."""

    def __init__(self, seed: int, length: int, meshes: list[tuple[int, ...]], operators: list[Operator]) -> None:
        self.random = random.Random(seed)
        self.mesh = self.random.choice(meshes)
        self.smallest = 0 if self.random.random() < EMPTY else 1
        self.leaves: list[Leaf] = []
        self.lines: list[str] = []
        self.values: dict[str, torch.Tensor] = {}
        space = [self.random.randint(1, 9) for _ in range(self.random.choice([1, 2, 2, 3]))]
        shape = [self.random.randint(1, 3), self.random.randint(1, 4), *space]
        if not self.smallest:
            shape[self.random.choice([0, *range(len(shape))])] = 0
        self.names = [self.leaf(shape) for _ in range(2)]
        while len(self.lines) < length:
            self.add(self.random.choice(operators))

    def leaf(self, shape: Any, kind: str | int = "numbers") -> str:
        anywhere = [*range(len(shape)), *range(2, len(shape)), "R", *("P" for _ in shape[:1] if kind == "numbers")]
        at = tuple(self.random.choice(anywhere) for _ in self.mesh)
        leaf = Leaf(f"x{len(self.leaves)}", tuple(shape), at, kind)
        self.leaves.append(leaf)
        self.values[leaf.name] = leaf.values().requires_grad_(kind == "numbers")
        return leaf.name

    def any(self, fewest: int = 1, most: int = 6) -> tuple[str, torch.Tensor]:
        """One of the latest tensors with so many dimensions."""
        fitting = [name for name in self.names if fewest <= self.values[name].dim() <= most]
        name = self.random.choice(fitting[-4:])  # IndexError: there is none
        return name, self.values[name]

    def derive(self, value: torch.Tensor) -> None:
        """Some operators of nothing have no gradients, or none that are numbers."""
        leaves = [self.values[leaf.name] for leaf in self.leaves]
        found = gradients([value], [leaf for leaf in leaves if leaf.requires_grad], keep=True)
        assert all(one is None or one.isfinite().all() for one in found)

    def give_up(self) -> int:
        raise ValueError

    def dim(self, tensor: torch.Tensor) -> int:
        return self.random.randrange(tensor.dim())

    def add(self, operator: Callable[[Writer], str]) -> None:
        """One more line, if torch likes it and there are not too many numbers, small enough to be compared."""
        before = len(self.leaves)
        name = f"v{len(self.lines)}"
        try:
            text = operator(self).replace("@", name)
            line = text if text.startswith(name) else f"{name} = {text}"
            made: dict[str, Any] = {"torch": torch, "F": F, **self.values}
            exec(line, made)
            if not self.smallest:
                self.derive(made[name])
        except (RuntimeError, IndexError, ValueError, AssertionError, ZeroDivisionError):
            del self.leaves[before:]
            return
        value = made[name]
        fits = self.smallest <= value.numel() <= MOST and value.dim() <= 6 and bool(value.isfinite().all())
        if fits and (not value.numel() or value.abs().max() < LARGEST):
            self.lines.append(line)
            self.names.append(name)
            self.values[name] = value
        else:
            del self.leaves[before:]


Operator = Callable[[Writer], str]
"""Writes a line, in which "@" is the name of its value."""
