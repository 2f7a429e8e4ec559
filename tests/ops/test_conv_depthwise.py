"""Depthwise layers with large kernels take their weight gradient by correlation, in float32 on CPUs."""

from __future__ import annotations

from dataclasses import replace

import torch

from tests.cases import Case, check, random_case
from tests.harness import Pool


def depthwise(seed: int, mesh: tuple[int, ...]) -> Case:
    case = random_case(seed, mesh)
    spatial = len(case.size)
    at = tuple(min(dim, spatial + 1) if isinstance(dim, int) else dim for dim in case.input)
    return replace(
        case, channels=(6, 6), groups=6, dtype=torch.float32, channels_last=False, kernel=(5, 4, 5)[:spatial],
        size=(9, 17, 12)[:spatial], padding=(2, 3, 2)[:spatial], dilation=(1,) * spatial,
        output_padding=(0,) * spatial, input=at,
        weight=("R",) * len(mesh), gradient=None,
    )  # fmt: skip


def test_depthwise_weight_gradients(pool: Pool) -> None:
    for mesh in ((2,), (4,), (2, 2)):
        pool.run_cases(check, [depthwise(7000 + seed, mesh) for seed in range(16)], mesh=mesh)
