"""Gradients of samples that lie on several ranks, against one process."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, distribute_module

import convmesh
from convmesh.per_sample import samples
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


class Tied(nn.Module):
    """A layer that is called twice, a weight that two layers hold, and a time step for each sample."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(2, 2, 3, padding=1), nn.Conv2d(2, 2, 3, padding=1, bias=False)
        self.second.weight = self.first.weight
        self.time, self.head = nn.Linear(1, 2), nn.ConvTranspose2d(2, 3, 2, stride=2)

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        x = self.first(input=x).sin() + self.time(time)[:, :, None, None]
        return self.head(self.second(self.first(x)))


class Dice(nn.Module):
    """Makes zeros, and writes the targets into them."""

    def forward(self, output: Tensor, y: Tensor) -> Tensor:
        target = torch.zeros(output.shape, dtype=output.dtype).scatter_(1, y, 1)
        return 1 - (target * output.softmax(1)).sum() / (target + output.softmax(1)).sum()


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
    in_a_loop = mock.patch.object(samples, "map_with_loop", side_effect=AssertionError("layers were not recognised"))
    with convmesh.enable(), Sizes() as sizes, in_a_loop:
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


def run_tied(mesh: DeviceMesh, what: str) -> None:
    torch.manual_seed(0)
    model, loss = Tied().double(), Dice()
    x, time = torch.randn(3, 2, 6, 5, dtype=torch.float64), torch.rand(3, 1, dtype=torch.float64)
    y = torch.randint(0, 3, (3, 1, 12, 10))
    options = {"max_norm": 0.01} if what == "clipped_gradient" else {}
    function: Callable[..., Any] = getattr(convmesh, what)
    expected = function(model, loss, (x, time), y, **options)
    for distributed in (model, convmesh.distribute(model, mesh)):
        convmesh.distribute(loss := Dice(), mesh)
        images, targets = convmesh.shard(x, mesh, h=2), convmesh.shard(y, mesh, h=2)
        with convmesh.enable():
            actual = function(distributed, loss, (images, convmesh.shard(time, mesh)), targets, **options)
        one = isinstance(actual, Tensor)
        for name, value in ({"": actual} if one else actual).items():
            assert_close(value.full_tensor(), expected if one else expected[name])


def test_tied_weights_several_inputs_and_targets_of_one_hot(pool: Pool) -> None:
    pool.run_cases(run_tied, ["per_sample_gradients", "per_sample_norms", "clipped_gradient"], (2,), ("h",))
