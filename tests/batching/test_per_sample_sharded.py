"""Gradients of samples that lie on several ranks, against one process."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, distribute_module

import convmesh
from tests.cases import place
from tests.compare import assert_close
from tests.gathers import Sizes
from tests.harness import Pool


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        *(nn.Conv2d(2, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.ReLU(inplace=True)),
        *(nn.Conv2d(4, 4, 3, padding=1, groups=4), nn.Conv2d(4, 6, 3, stride=2, padding=1, bias=False), nn.ReLU()),
        *(nn.Conv2d(6, 24, 1), nn.GroupNorm(4, 24), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(24, 5)),
    ).double()


MODELS = {"plain": lambda model, mesh: model, "replicated": distribute_module, "distributed": convmesh.distribute}


@dataclass(frozen=True)
class Case:
    what: str
    parameters: str
    x_at: tuple[Any, ...]
    samples: int


def run(mesh: DeviceMesh, case: Case) -> None:
    model, x = network(), torch.randn(case.samples, 2, 8, 10, dtype=torch.float64)
    y = torch.randint(0, 5, (case.samples,))
    options = {"max_norm": 1.5} if case.what == "clipped_gradient" else {}
    function: Callable[..., Any] = getattr(convmesh, case.what)
    expected = function(model, F.cross_entropy, x, y, **options)
    y_at = tuple(0 if at == 0 else "R" for at in case.x_at)
    with convmesh.enable(), Sizes() as sizes:
        placed = MODELS[case.parameters](network(), mesh)
        actual = function(placed, F.cross_entropy, place(x, mesh, case.x_at), place(y, mesh, y_at), **options)
    if case.samples > 1:  # what torch does with one sample on several ranks is its own affair
        largest = max(parameter.nbytes for parameter in model.parameters())
        assert sizes.replicated_at_once <= case.samples * largest, "a parameter's gradients, never an activation"
    if isinstance(actual, Tensor):
        actual, expected = {"": actual}, {"": expected}
    assert actual.keys() == expected.keys()
    for name, value in actual.items():
        assert_close(value.full_tensor() if isinstance(value, DTensor) else value, expected[name])


@pytest.mark.parametrize("what", ["per_sample_gradients", "per_sample_norms", "clipped_gradient"])
@pytest.mark.parametrize("mesh", [(2,), (4,), (2, 2)])
def test_samples_on_several_ranks(pool: Pool, mesh: tuple[int, ...], what: str) -> None:
    layouts = [(0,), (3,)] if len(mesh) == 1 else [(0, 2), (0, 0), (2, 3)]
    cases = [Case(what, kind, at, 5) for kind in MODELS for at in layouts] + [Case(what, "plain", layouts[0], 1)]
    pool.run_cases(run, cases, mesh=mesh)
