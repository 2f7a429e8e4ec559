"""vmap over convolutions of DTensors: mapped, batch and spatial dimensions sharded, against one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.debug import CommDebugMode
from torch.func import grad, vmap

import convmesh
from tests.cases import place
from tests.compare import assert_close, same_on_all_ranks
from tests.harness import Pool

SAMPLES, BATCH = 8, 4
GATHERS = {"all_gather_into_tensor", "all_gather_into_tensor_coalesced"}


def convolve(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return F.conv2d(x, w, padding=1)


def loss(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return convolve(x, w).square().sum()


# What is computed, and which of (x, w) is mapped.
KINDS = {
    "inputs": (lambda x, w: vmap(convolve, (0, None))(x, w), (True, False)),
    "weights": (lambda x, w: vmap(convolve, (None, 0))(x, w), (False, True)),
    "both": (lambda x, w: vmap(convolve)(x, w), (True, True)),
    "per-sample gradients": (lambda x, w: vmap(grad(loss), (None, 0))(w, x), (True, False)),
    "gradients of an ensemble": (lambda x, w: vmap(grad(loss))(w, x), (True, True)),
    "gradients of an ensemble, shared input": (lambda x, w: vmap(grad(loss), (0, None))(w, x), (False, True)),
    "gradient through vmap": (
        lambda x, w: grad(lambda w: vmap(convolve, (0, None))(x, w).square().sum())(w), (True, False),
    ),
}  # fmt: skip


def run(mesh: DeviceMesh, case: tuple[str, tuple[Any, ...], tuple[Any, ...]]) -> None:
    kind, x_at, w_at = case
    function, (x_mapped, w_mapped) = KINDS[kind]
    torch.manual_seed(0)
    x = torch.randn(*[SAMPLES] * x_mapped, BATCH, 3, 8, 10, dtype=torch.float64)
    w = torch.randn(*[SAMPLES] * w_mapped, 5, 3, 3, 3, dtype=torch.float64)
    expected = function(x, w)
    with convmesh.enable(), CommDebugMode() as sent:
        actual = function(place(x, mesh, x_at), place(w, mesh, w_at))
    assert not GATHERS & {collective.__name__ for collective in sent.get_comm_counts()}
    assert_close(actual.full_tensor(), expected)


def layouts(x_mapped: bool, w_mapped: bool, places: list[str]) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Where x and w lie if the mesh dimensions cut the mapped, the batch or a spatial dimension."""
    at = {"mapped": 0, "batch": int(x_mapped), "height": 2 + x_mapped, "width": 3 + x_mapped}
    x = tuple("R" if place == "mapped" and not x_mapped else at[place] for place in places)
    w = tuple(0 if place == "mapped" and w_mapped else "R" for place in places)
    return x, w


@pytest.mark.parametrize("kind", KINDS)
def test_one_dimension_sharded(pool: Pool, kind: str) -> None:
    mapped = KINDS[kind][1]
    cases = [(kind, *layouts(*mapped, [place])) for place in ("mapped", "batch", "height", "width")]
    pool.run_cases(run, cases, mesh=(2,))
    pool.run_cases(run, cases, mesh=(4,))


@pytest.mark.parametrize("kind", KINDS)
def test_two_dimensions_sharded(pool: Pool, kind: str) -> None:
    mapped = KINDS[kind][1]
    pairs = [["mapped", "width"], ["batch", "height"], ["height", "width"]]
    pool.run_cases(run, [(kind, *layouts(*mapped, pair)) for pair in pairs], mesh=(2, 2))


def uneven(mesh: DeviceMesh) -> str:
    x = place(torch.randn(5, BATCH, 3, 8, 10), mesh, (0,))
    w = place(torch.randn(5, 3, 3, 3), mesh, ("R",))
    with convmesh.enable(), pytest.raises(convmesh.ShardingError) as caught:
        vmap(convolve, (0, None))(x, w)
    return str(caught.value)


def test_shards_of_unequal_sizes_of_the_mapped_dimension_are_refused(pool: Pool) -> None:
    assert "map a multiple of 2 samples" in same_on_all_ranks(pool.run(uneven, mesh=(2,)))
