"""Optimizers, gradient clipping and loss scaling."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.nn.utils import clip_grad_norm_

import convmesh
from convmesh import _torch
from tests.cases import place
from tests.compare import assert_close
from tests.harness import Pool
from tests.ops.parameters import SHAPES, gradients

# For every tensor of SHAPES: where the parameter is, and where its gradient comes.
PLACES: dict[str, tuple[tuple[int, ...], list[tuple[tuple[Any, ...], tuple[Any, ...]]]]] = {
    "replicated, gradients pending": ((4,), [(("R",), ("P",))] * 5),
    "sharded": ((4,), [((0,), (0,))] * 5),
    "mixed": ((4,), [((0,), (0,)), (("R",), ("P",)), ((1,), (1,)), (("R",), ("R",)), ((0,), ("P",))]),
    "2x2": (
        (2, 2),
        [((0, 1), (0, 1)), (("R", "R"), ("P", "P")), (("R", 0), ("P", 0)), ((1, 1), (1, 1)), ((1, "R"), (1, "P"))],
    ),
}


@dataclass(frozen=True)
class Recipe:
    name: str
    options: dict[str, Any] = field(default_factory=dict)
    clip: bool | None = None  # whether to clip gradients, with foreach or without
    scaled: bool = False

    def optimizer(self, parameters: list[torch.Tensor]) -> torch.optim.Optimizer:
        made: torch.optim.Optimizer = getattr(torch.optim, self.name)(parameters, lr=0.1, **self.options)
        return made


RECIPES = [
    Recipe(name, {**options, **how})
    for name, options in [
        ("SGD", {}),
        ("SGD", {"momentum": 0.9, "weight_decay": 0.1}),
        ("SGD", {"momentum": 0.9, "nesterov": True}),
        ("Adam", {}),
        ("AdamW", {"amsgrad": True, "weight_decay": 0.1, "maximize": True}),
        ("Adagrad", {"lr_decay": 0.1}),
        ("RMSprop", {"momentum": 0.5, "centered": True}),
    ]
    for how in ({"foreach": False}, {"foreach": True}, {"fused": True})
    if not (name == "RMSprop" and "fused" in how)
]
CLIPPED = [Recipe("Adam", {"foreach": foreach}, clip=foreach) for foreach in (True, False)]
SCALED = [Recipe("Adam", how, scaled=True) for how in ({"foreach": False}, {"foreach": True}, {"fused": True})]


def _own(tensor: DTensor) -> DTensor:
    """In memory of its own, as a gradient is that autograd has made."""
    return _torch.wrap(_torch.local_of(tensor).clone(), _torch.spec_of(tensor))


def train(recipe: Recipe, mesh: DeviceMesh | None, places: list[Any]) -> tuple[list[torch.Tensor], list[int]]:
    """Three steps; the parameters, and how many all-reduces each step took. One gradient of the second overflows."""
    start = gradients(100)
    parameters = [t if mesh is None else place(t, mesh, at) for t, (at, _) in zip(start, places, strict=True)]
    parameters = [p.detach().clone().requires_grad_() for p in parameters]
    optimizer, reductions = recipe.optimizer(parameters), []
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, enabled=recipe.scaled)
    scaler.scale(torch.zeros(()))
    for step in range(3):
        for number, (parameter, g, (_, at)) in enumerate(zip(parameters, gradients(step), places, strict=True)):
            if recipe.scaled:
                g = g * scaler.get_scale()
                if step == 1 and number == 2:
                    g.view(-1)[-1] = float("inf")
            parameter.grad = g if mesh is None else _own(place(g, mesh, at))
        with CommDebugMode() as communication:
            scaler.unscale_(optimizer)
            if recipe.clip is not None:
                clip_grad_norm_(parameters, 0.5, foreach=recipe.clip)
            scaler.step(optimizer)
            scaler.update()
        counts = communication.get_comm_counts()
        assert not any("gather" in str(kind) for kind in counts), counts
        reductions.append(sum(count for kind, count in counts.items() if "all_reduce" in str(kind)))
    return [p.detach() for p in parameters], reductions


def check_training(mesh: DeviceMesh, case: tuple[Recipe, str]) -> list[int]:
    recipe, where = case
    places = PLACES[where][1]
    expected, _ = train(recipe, None, places)
    with convmesh.enable():
        actual, reductions = train(recipe, mesh, places)
        for parameter, value, (at, _) in zip(actual, expected, places, strict=True):
            assert isinstance(parameter, DTensor)
            assert parameter.placements == place(value, mesh, at).placements
            assert_close(parameter.full_tensor(), value)
    return reductions


@pytest.mark.parametrize("where", PLACES)
def test_training_is_that_of_one_process(pool: Pool, where: str) -> None:
    counts = pool.run_cases(check_training, [(recipe, where) for recipe in RECIPES], mesh=PLACES[where][0])
    if where == "replicated, gradients pending":
        assert {tuple(count) for by_rank in counts for count in by_rank} == {(1, 1, 1)}, "all gradients travel at once"
    if where == "sharded":
        assert {tuple(count) for by_rank in counts for count in by_rank} == {(0, 0, 0)}


@pytest.mark.parametrize("where", PLACES)
def test_clipping_and_scaling(pool: Pool, where: str) -> None:
    counts = pool.run_cases(check_training, [(r, where) for r in [*CLIPPED[:1], *SCALED]], mesh=PLACES[where][0])
    if where == "replicated, gradients pending":
        assert {tuple(count) for by_rank in counts for count in by_rank} == {(1, 1, 1)}, "the first use reduces for all"


@pytest.mark.parametrize("where", PLACES)
def test_clipping_tensor_by_tensor(pool: Pool, where: str) -> None:
    counts = pool.run_cases(check_training, [(CLIPPED[1], where)], mesh=PLACES[where][0])
    if where == "replicated, gradients pending":
        assert {tuple(count) for by_rank in counts for count in by_rank} == {(5, 5, 5)}, "each gradient is reduced once"


def check_clipping(mesh: DeviceMesh, case: tuple[str, float, bool]) -> None:
    where, order, foreach = case
    places, plain = PLACES[where][1], [torch.zeros(shape, dtype=torch.float64) for shape in SHAPES]
    for parameter, g in zip(plain, gradients(5), strict=True):
        parameter.grad = g
    expected = clip_grad_norm_(plain, 0.3, order, foreach=foreach)
    with convmesh.enable():
        sharded = [place(torch.zeros_like(p), mesh, at) for p, (at, _) in zip(plain, places, strict=True)]
        for parameter, g, (_, at) in zip(sharded, gradients(5), places, strict=True):
            parameter.grad = _own(place(g, mesh, at))
        total = torch.nn.utils.get_total_norm([p.grad for p in sharded], order, foreach=foreach)
        clipped = clip_grad_norm_(sharded, 0.3, order, error_if_nonfinite=True, foreach=foreach)
        for actual in (total, clipped):
            assert_close(actual.full_tensor(), expected)
        for parameter, value in zip(sharded, plain, strict=True):
            assert_close(parameter.grad.full_tensor(), value.grad)
        sharded[1].grad.fill_(float("nan"))
        with pytest.raises(RuntimeError, match="non-finite"):
            clip_grad_norm_(sharded, 0.3, order, error_if_nonfinite=True, foreach=foreach)


@pytest.mark.parametrize("where", PLACES)
def test_clipping_by_several_norms(pool: Pool, where: str) -> None:
    cases = [(where, order, foreach) for order in (1.0, 2.0, 3.0, float("inf")) for foreach in (False, True)]
    pool.run_cases(check_clipping, cases, mesh=PLACES[where][0])
