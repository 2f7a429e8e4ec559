"""Ranks that compute the same take the same algorithms, whatever one of them has, has measured, or has not."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from tempfile import TemporaryDirectory
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.func import grad, vmap

import convmesh
from convmesh import batching, kernels
from convmesh.batching import benchmark, choice, machines
from convmesh.comm import agreed_facts
from tests.cases import place
from tests.compare import same_on_all_ranks
from tests.harness import Pool

B = 16


def loss(w: Tensor, x: Tensor) -> Tensor:
    return F.conv2d(x, w, padding=1).square().sum()


def tensors() -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    return torch.randn(B, 64, 64, 3, 3), torch.randn(B, 1, 64, 8, 8)


def per_sample(mesh: DeviceMesh) -> list[Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(64, 64, 3, padding=1), nn.Flatten(), nn.Linear(64 * 64, 3))
    x, y = place(torch.randn(B, 64, 8, 8), mesh, (0, "R")), place(torch.randint(0, 3, (B,)), mesh, (0, "R"))
    gradients = convmesh.per_sample_gradients(model, F.cross_entropy, x, y)
    return [each.to_local() for each in gradients.values()]


def mapped(mesh: DeviceMesh, at: Any) -> list[Tensor]:
    return [each.to_local() for each in vmap(grad(loss, (0, 1)))(*(place(each, mesh, at) for each in tensors()))]


# On a mesh (1, 2) all have the same local tensors on both ranks.
WAYS: Mapping[str, Callable[[DeviceMesh], list[Tensor]]] = {
    "plain": lambda _: list(vmap(grad(loss, (0, 1)))(*tensors())),
    "replicated": lambda mesh: mapped(mesh, ("R", "R")),
    "sharded": lambda mesh: mapped(mesh, (0, "R")),
    "per-sample gradients": per_sample,
}


@contextmanager
def nothing_known(case: str) -> Iterator[None]:
    """Nor agreed upon; and what is agreed upon here, other ranks and other tests do not know."""
    with agreed_facts.asked_anew(case):
        choice.forget()
        yield
    choice.forget()


@contextmanager
def odd(kind: str, case: str) -> Iterator[None]:
    """On the second rank other than on the first: kernels, and what is fastest."""
    second = dist.get_rank() == 1
    with ExitStack() as stack:
        if kind == "kernels" and second:
            stack.enter_context(mock.patch.object(kernels, "available", return_value=False))
        if kind == "clock":
            kernels.available()  # from the cache that all tests use
            folder = stack.enter_context(TemporaryDirectory())
            stack.enter_context(mock.patch.dict("os.environ", {"CONVMESH_CACHE": folder}))
            fastest = slice(None, None, -1 if second else 1)
            by_order = mock.Mock(side_effect=lambda some, _: {each: i for i, each in enumerate([*some][fastest])})
            stack.enter_context(mock.patch.object(benchmark, "interleaved", by_order))
        stack.enter_context(nothing_known(f"{kind} {case}"))
        yield


def run(mesh: DeviceMesh, case: tuple[str, str]) -> Any:
    """What was taken, the bits, and what this rank alone would have taken."""
    kind, way = case
    results: list[list[Tensor]] = []
    with odd(kind, way), convmesh.enable(benchmark=kind == "clock"):
        decisions = batching.explain(lambda: results.append(WAYS[way](mesh)))
        alone = [replace(decision.task, machine=machines.OWN) for decision in decisions]
        own = [choice.choose(task).algorithm.name for task in alone]
    return [each.algorithm.name for each in decisions], results[0], own


@pytest.mark.parametrize("kind", ["kernels", "clock"])
def test_one_rank_is_odd(pool: Pool, kind: str) -> None:
    by_case = pool.run_cases(run, [(kind, way) for way in WAYS], mesh=(1, 2))
    for results in by_case:
        taken, _ = same_on_all_ranks([result[:2] for result in results])
        assert taken
    own = [[result[2] for result in results] for results in by_case]
    assert (own[0][0] != own[0][1]) == (kind == "kernels")  # else nothing would be shown


def uneven(mesh: DeviceMesh, samples: int) -> list[str]:
    """Ranks whose parts differ, or are empty, ask for nothing that others do not ask for."""
    w, x = tensors()
    with odd("clock", f"uneven {samples}"), convmesh.enable(benchmark=True):
        parts = [place(each[:samples], mesh, (0,)) for each in (x, w)]
        decisions = batching.explain(vmap(F.conv2d), *parts)
        again = batching.explain(vmap(F.conv2d), *parts)
    assert [each.algorithm for each in again] == [each.algorithm for each in decisions]
    return [each.reason.partition(":")[0] for each in decisions]


def test_the_clock_of_the_first_rank_counts_for_uneven_parts(pool: Pool) -> None:
    results = pool.run_cases(uneven, [3, 2, 1], mesh=(2,))
    assert results == [[["measured"], ["measured"]], [["measured"], ["measured"]], [["measured"], []]]


def agreed_for_plain_tensors(mesh: DeviceMesh, kind: str) -> Any:
    with odd(kind, "plain tensors"), convmesh.enable(mesh=mesh):
        with convmesh.enable():  # leaves it as it is
            pass
        decisions = batching.explain(WAYS["plain"], mesh)
    return {each.algorithm.name for each in decisions}


@pytest.mark.parametrize("kind", ["nothing", "kernels"])
def test_ranks_agree_for_plain_tensors_when_switched_on(pool: Pool, kind: str) -> None:
    names = same_on_all_ranks(pool.run(agreed_for_plain_tensors, kind, mesh=(2,)))
    assert bool({"direct", "winograd"} & names) == (kind == "nothing")
