"""Reductions over sharded dimensions against one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

import convmesh
from tests.cases import place
from tests.harness import Pool
from tests.ops.agreement import Sample, agree

DIFFERENTIABLE: dict[str, Callable[..., Any]] = {
    "mean": lambda x: x.mean(),
    "mean of rows": lambda x: x.mean(-1),
    "mean kept": lambda x: x.mean((1, 2), keepdim=True),
    "sum": lambda x: x.sum((0, 2)),
    "var": lambda x: x.var(),
    "var of some": lambda x: x.var((0, 2), correction=0),
    "std": lambda x: x.std(1, keepdim=True),
    "var_mean": lambda x: torch.var_mean(x, (1, 2)),
    "std_mean": lambda x: torch.std_mean(x, 2, correction=2),
    "amax": lambda x: x.amax((0, 1)),
    "amin": lambda x: x.amin(2, keepdim=True),
    "max": lambda x: x.max(),
    "min": lambda x: x.min(),
    "max along": lambda x: tuple(x.max(1)),
    "min along": lambda x: tuple(x.min(2, keepdim=True)),
    "norm": lambda x: x.norm(),
    "norm 1": lambda x: torch.linalg.vector_norm(x, 1, (1,)),
    "norm 3": lambda x: torch.linalg.vector_norm(x, 3, (0, 2), keepdim=True),
    "norm inf": lambda x: torch.linalg.vector_norm(x, float("inf"), 2),
    "norm 0": lambda x: torch.linalg.vector_norm(x, 0, 2),
    "norm -2": lambda x: torch.linalg.vector_norm(x, -2, 2),
    "logsumexp": lambda x: x.logsumexp((1, 2)),
    "softmax": lambda x: x.softmax(1),
    "log_softmax": lambda x: x.log_softmax(2),
    "normalize": lambda x: F.normalize(x, dim=1),
    "dice": lambda x: 1 - 2 * (x.sigmoid() * x).sum((0, 2)) / (x.sigmoid().sum((0, 2)) + x.square().sum((0, 2)) + 1),
}
INDICES: dict[str, Callable[..., Any]] = {
    "argmax": lambda x: x.argmax(),
    "argmin": lambda x: x.argmin(),
    "argmax along": lambda x: x.argmax(1),
    "argmin kept": lambda x: x.argmin(2, keepdim=True),
}
FUNCTIONS = DIFFERENTIABLE | INDICES
PLACES = {
    (2,): [(0,), (1,), (2,), ("P",), ("R",)],
    (4,): [(0,), (1,), (2,), ("P",)],
    (2, 2): [(0, 1), (1, 2), (2, 2), ("P", 2), (1, "R"), (0, "P")],
}


def numbers(*shape: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def reduce_sharded(mesh: DeviceMesh, case: tuple[str, tuple[Any, ...]]) -> None:
    name, at = case
    # Over 4 ranks 6 and 5 leave one without any.
    agree(mesh, FUNCTIONS[name], Sample([numbers(6, 5, 7)], [at], [name in DIFFERENTIABLE]))


@pytest.mark.parametrize("mesh", PLACES)
def test_reductions_agree_with_one_process_without_gathering(pool: Pool, mesh: tuple[int, ...]) -> None:
    cases = [(name, at) for name in FUNCTIONS for at in PLACES[mesh]]
    pool.run_cases(reduce_sharded, cases, mesh=mesh, share=1 / 3)


def gradients_of_two_places(mesh: DeviceMesh) -> None:
    """Of tensors of one shape, each gradient lies as its own tensor does."""
    with convmesh.enable():
        for at in (0, "R", 1, "R"):
            x = place(torch.randn(4, 6), mesh, (at,)).requires_grad_()
            (x * 2).sum().backward()
            assert isinstance(x.grad, DTensor)
            assert x.grad.placements == x.placements


def test_gradients_lie_as_their_tensors(pool: Pool) -> None:
    pool.run(gradients_of_two_places, mesh=(2,))


def same(mesh: DeviceMesh) -> None:
    x = torch.arange(10.0)
    with convmesh.enable():
        whole, part = place(x, mesh, ("R",)), place(x, mesh, (0,))
        assert torch.equal(part, whole)
        assert torch.equal(whole, part)
        assert not torch.equal(part, place(x + (x == 9), mesh, (0,)))
        assert not torch.equal(part, place(x[:9], mesh, (0,)))


def test_equal_on_part_of_the_ranks(pool: Pool) -> None:
    pool.run(same, mesh=(2,))
