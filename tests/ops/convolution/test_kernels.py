"""Layers whose local part is not computed by torch's own convolution."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from tests.cases import Case, check, random_case
from tests.harness import Pool


def depthwise(seed: int, mesh: tuple[int, ...]) -> Case:
    """With large kernels they take their weight gradient by correlation, in float32 on CPUs."""
    case = random_case(seed, mesh)
    spatial = len(case.size)
    at = tuple(min(dim, spatial + 1) if isinstance(dim, int) else dim for dim in case.input)
    return replace(
        case, channels=(6, 6), groups=6, dtype=torch.float32, channels_last=spatial > 1 and seed % 2 == 1,
        kernel=(5, 4, 5)[:spatial], size=(9, 17, 12)[:spatial], padding=(2, 3, 2)[:spatial], dilation=(1,) * spatial,
        output_padding=(0,) * spatial, input=at,
        weight=("R",) * len(mesh), gradient=None,
    )  # fmt: skip


def skipping(seed: int, mesh: tuple[int, ...]) -> Case:
    """One index at a time and not all of them, as where a residual network halves its images."""
    case = random_case(seed, mesh)
    spatial = len(case.size)
    return replace(
        case, kernel=(1,) * spatial, stride=((2,), (2, 2), (3, 1, 2))[spatial - 1], padding=(0,) * spatial,
        transposed=False, output_padding=(0,) * spatial,
        size=tuple(size if seed % 2 else (24, 16, 8)[axis] for axis, size in enumerate(case.size)),
    )  # fmt: skip


@pytest.mark.parametrize("layer", [depthwise, skipping])
def test_layers(pool: Pool, layer: Callable[[int, tuple[int, ...]], Case]) -> None:
    for mesh in ((2,), (4,), (2, 2)):
        pool.run_cases(check, [layer(7000 + seed, mesh) for seed in range(16)], mesh=mesh)
