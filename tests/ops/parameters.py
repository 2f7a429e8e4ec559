"""Parameters of a model of no use, and gradients for them."""

from __future__ import annotations

import torch

SHAPES = [(6, 5), (7,), (3, 2, 3, 3), (1, 4), (2, 9)]


def gradients(step: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in SHAPES]
