"""Plain tensors under torch.compile: refused as in eager code, but for the constants of a distributed module."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.experimental import implicit_replication

import convmesh
from tests.cases import place
from tests.compare import assert_close
from tests.harness import Pool

NUMBERS = torch.linspace(-1, 1, 48, dtype=torch.float64).reshape(3, 1, 4, 4)


class WithConstants(nn.Module):
    """Makes plain tensors in its forward pass, which take part in its gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 2, 3, padding=1, dtype=torch.float64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        columns = torch.arange(4.0, dtype=torch.float64)
        return self.conv(x * columns) * torch.tensor([[1.0, 2.0, 3.0, 4.0]], dtype=torch.float64)


class Nested(nn.Module):
    """A module of torch's own class calls one with constants."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(WithConstants(), nn.ReLU())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


def compiled(function: Any, **options: Any) -> Any:
    return torch.compile(function, backend="aot_eager", **options)


def before(model: nn.Module, mesh: DeviceMesh, options: Any) -> Any:
    run = compiled(model, **options)
    convmesh.distribute(model, mesh)
    return run


def after(model: nn.Module, mesh: DeviceMesh, options: Any) -> Any:
    return compiled(convmesh.distribute(model, mesh), **options)


def in_place(model: nn.Module, mesh: DeviceMesh, options: Any) -> Any:
    convmesh.distribute(model, mesh).compile(backend="aot_eager", **options)
    return model


def by_a_function(model: nn.Module, mesh: DeviceMesh, options: Any) -> Any:
    convmesh.distribute(model, mesh)
    return compiled(lambda x: model(x) * 1.0, **options)


WAYS = {way.__name__: way for way in (before, after, in_place, by_a_function)}
MODELS: dict[str, Callable[[], nn.Module]] = {
    "sequential": lambda: nn.Sequential(WithConstants(), nn.ReLU()),
    "own class": WithConstants,
    "nested": Nested,
}


@contextmanager
def refused(says: str) -> Iterator[None]:
    """By an error that has the reason and the remedy, whatever the compiler wraps around it."""
    with pytest.raises(Exception, match=f"(?s){says}.*remedy: "):
        yield


def check_module(mesh: DeviceMesh, case: tuple[str, str, bool]) -> None:
    name, way, fullgraph = case
    torch._dynamo.reset()
    torch.manual_seed(0)
    dense = MODELS[name]()
    model = MODELS[name]()
    model.load_state_dict(dense.state_dict())
    run = WAYS[way](model, mesh, {"fullgraph": fullgraph})
    with refused("is a plain torch.Tensor"):
        run(NUMBERS.clone())
    result = run(place(NUMBERS, mesh, (0,)))
    result.square().sum().backward()
    expected = dense(NUMBERS)
    expected.square().sum().backward()
    assert_close(result.full_tensor(), expected)
    for mine, wanted in zip(model.parameters(), dense.parameters(), strict=True):
        assert_close(mine.grad.full_tensor(), wanted.grad)
    with refused("is a plain torch.Tensor"):
        run(NUMBERS.clone())


def test_a_compiled_module_refuses_plain_inputs_and_has_constants(pool: Pool) -> None:
    cases = [(name, way, fullgraph) for name in MODELS for way in WAYS for fullgraph in (False, True)]
    pool.run_cases(check_module, cases[::3], mesh=(2,))


def check_beside(mesh: DeviceMesh, fullgraph: bool) -> None:
    torch._dynamo.reset()
    x, plain, weight = place(NUMBERS, mesh, (0,)), NUMBERS.clone(), torch.ones(1, 1, 3, 3, dtype=torch.float64)
    says = "plain torch.Tensor beside DTensors"
    options = {"fullgraph": fullgraph}
    with convmesh.enable():
        with refused(says):
            compiled(lambda x, y: x + y, **options)(x, plain)
        with refused(says):
            compiled(lambda x: x * torch.arange(4.0), **options)(x)
        with refused(says):
            compiled(F.conv2d, **options)(x, weight)
        with refused(says):
            compiled(lambda x: torch.maximum(x, x.full_tensor()), **options)(x)
        # A number says the same on every rank, or is nobody's part.
        assert_close(compiled(lambda x: x + torch.tensor(2.0), **options)(x).full_tensor(), NUMBERS + 2)


def test_plain_tensors_beside_dtensors(pool: Pool) -> None:
    pool.run_cases(check_beside, [False, True], mesh=(2,))


def check_part_of_a_module(mesh: DeviceMesh) -> None:
    """A submodule that is compiled takes constants in the model's forward pass, and when it is called by itself."""
    torch._dynamo.reset()
    model = Nested()
    part = model.layers[0]
    part.compile(backend="aot_eager", fullgraph=True)
    convmesh.distribute(model, mesh)
    x = place(NUMBERS, mesh, (0,))
    wanted = model(x).full_tensor()
    assert_close(part(x).relu().full_tensor(), wanted)
    assert_close(model(x).full_tensor(), wanted)


def test_a_compiled_part_of_a_module(pool: Pool) -> None:
    pool.run(check_part_of_a_module, mesh=(2,))


def check_implicit_replication(mesh: DeviceMesh) -> None:
    torch._dynamo.reset()
    x, plain, weight = place(NUMBERS, mesh, (0,)), NUMBERS + 1, torch.ones(1, 1, 3, 3, dtype=torch.float64)

    def function(x: Any, plain: Any, weight: Any) -> Any:
        return torch.maximum(F.conv2d(x + plain, weight, padding=1), plain)

    both = (function, compiled(function, fullgraph=True))
    with convmesh.enable():
        for run in both:
            with implicit_replication():
                assert_close(run(x, plain, weight).full_tensor(), function(NUMBERS, plain, weight))
            with refused("plain torch.Tensor beside DTensors"):
                run(x, plain, weight)


def test_implicit_replication(pool: Pool) -> None:
    pool.run(check_implicit_replication, mesh=(2,))
