"""vmap over convolutions of DTensors: mapped, batch and spatial dimensions sharded, against one process."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.placement_types import Partial, Replicate, Shard
from torch.func import grad, jacrev, vmap

import convmesh
from convmesh import batching
from tests.cases import place
from tests.compare import assert_close
from tests.harness import Pool

BATCH = 4
GATHERS = {"all_gather_into_tensor", "all_gather_into_tensor_coalesced"}


def convolve(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return F.conv2d(x, w, padding=1, groups=x.shape[-3] // w.shape[-3])


def loss(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return convolve(x, w).square().sum()


# What is computed, and which of (x, w) is mapped.
KINDS = {
    "inputs": (lambda x, w: vmap(convolve, (0, None))(x, w), (True, False)),
    "weights": (lambda x, w: vmap(convolve, (None, 0))(x, w), (False, True)),
    "both": (lambda x, w: vmap(convolve)(x, w), (True, True)),
    "per-sample gradients": (lambda x, w: vmap(grad(loss), (None, 0))(w, x), (True, False)),
    "gradients of inputs": (lambda x, w: vmap(grad(loss, 1), (None, 0))(w, x), (True, False)),
    "gradients of an ensemble": (lambda x, w: vmap(grad(loss))(w, x), (True, True)),
    "gradients of an ensemble, shared input": (lambda x, w: vmap(grad(loss), (0, None))(w, x), (False, True)),
    "gradient through vmap": (
        lambda x, w: grad(lambda w: vmap(convolve, (0, None))(x, w).square().sum())(w), (True, False),
    ),
    "gradient through an ensemble": (
        lambda x, w: grad(lambda w: vmap(convolve)(x, w).square().sum())(w), (True, True),
    ),
    "gradient through an ensemble, shared input": (
        lambda x, w: grad(lambda w: vmap(convolve, (None, 0))(x, w).square().sum())(w), (False, True),
    ),
}  # fmt: skip
PLACES = ("mapped", "batch", "height", "width")
PAIRS = (("mapped", "batch"), ("mapped", "width"), ("batch", "height"), ("height", "width"), ("width", "mapped"))


@dataclass(frozen=True)
class Sharded:
    kind: str
    places: tuple[str, ...]
    samples: int
    groups: int = 1

    def tensors(self) -> tuple[torch.Tensor, torch.Tensor]:
        x_mapped, w_mapped = KINDS[self.kind][1]
        torch.manual_seed(0)
        x = torch.randn(*[self.samples] * x_mapped, BATCH, 4, 8, 10, dtype=torch.float64)
        return x, torch.randn(*[self.samples] * w_mapped, 6, 4 // self.groups, 3, 3, dtype=torch.float64)

    def layouts(self) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        """Where x and w lie if the mesh dimensions cut the mapped, the batch or a spatial dimension."""
        x_mapped, w_mapped = KINDS[self.kind][1]
        at = {"mapped": 0, "batch": int(x_mapped), "height": 2 + x_mapped, "width": 3 + x_mapped}
        x = tuple("R" if place == "mapped" and not x_mapped else at[place] for place in self.places)
        return x, tuple(0 if place == "mapped" and w_mapped else "R" for place in self.places)


def run(mesh: DeviceMesh, case: Sharded) -> None:
    function = KINDS[case.kind][0]
    (x, w), (x_at, w_at) = case.tensors(), case.layouts()
    expected = function(x, w)
    with convmesh.enable(), CommDebugMode() as sent:
        actual = function(place(x, mesh, x_at), place(w, mesh, w_at))
    if case.samples > 1:  # what stands beside the convolution here is not asked of one sample on several ranks
        assert not GATHERS & {collective.__name__ for collective in sent.get_comm_counts()}
    assert_close(actual.full_tensor(), expected)


@pytest.mark.parametrize("ranks", [2, 4])
def test_one_dimension_sharded(pool: Pool, ranks: int) -> None:
    pool.run_cases(run, [Sharded(kind, (place,), 8) for kind in KINDS for place in PLACES], mesh=(ranks,))


def test_two_dimensions_sharded(pool: Pool) -> None:
    pool.run_cases(run, [Sharded(kind, pair, 4) for kind in KINDS for pair in PAIRS], mesh=(2, 2))


@pytest.mark.parametrize("mesh", [(2,), (4,), (2, 2)])
def test_uneven_and_empty_shards_of_the_mapped_dimension(pool: Pool, mesh: tuple[int, ...]) -> None:
    """Of 5 samples over 4 ranks the last one has none."""
    places = [("mapped",)] if len(mesh) == 1 else [pair for pair in PAIRS if "mapped" in pair] + [("mapped", "mapped")]
    cases = [Sharded(kind, place, samples) for kind in KINDS for place in places for samples in (1, 5)]
    pool.run_cases(run, cases, mesh=mesh)


@pytest.mark.parametrize("mesh", [(2,), (2, 2)])
def test_groups(pool: Pool, mesh: tuple[int, ...]) -> None:
    places = [("mapped",), ("width",)] if len(mesh) == 1 else [("mapped", "batch"), ("mapped", "width")]
    pool.run_cases(run, [Sharded(kind, place, 3, 2) for kind in KINDS for place in places], mesh=mesh)


def own_samples(mesh: DeviceMesh) -> None:
    """Nothing travels, and the choice is one of a rank's own samples."""
    (x, w), (x_at, w_at) = (case := Sharded("per-sample gradients", ("mapped",), 5)).tensors(), case.layouts()
    operands = place(w, mesh, w_at), place(x, mesh, x_at)
    with convmesh.enable(), CommDebugMode() as sent:
        decisions = batching.explain(vmap(grad(loss), (None, 0)), *operands)
    assert sent.get_total_counts() == 0
    own = operands[1].to_local().shape[0]
    assert {decision.task.batch for decision in decisions} == ({own} if own else set())


def test_every_rank_computes_its_own_samples(pool: Pool) -> None:
    pool.run(own_samples, mesh=(4,))


def spatial_gradients(mesh: DeviceMesh) -> None:
    """One sum over the ranks that share the space, when it is asked for."""
    x, w = Sharded("per-sample gradients", ("mapped", "width"), 5).tensors()
    with convmesh.enable():
        actual = vmap(grad(loss), (None, 0))(place(w, mesh, ("R", "R")), place(x, mesh, (0, 4)))
        assert actual.placements == (Shard(0), Partial())
        with CommDebugMode() as sent:
            reduced = actual.redistribute(placements=[Shard(0), Replicate()])
        assert sent.get_total_counts() == 1
    assert_close(reduced.full_tensor(), vmap(grad(loss), (None, 0))(w, x))


def test_gradients_of_sharded_space_are_a_pending_sum(pool: Pool) -> None:
    pool.run(spatial_gradients, mesh=(2, 2))


# Over (x, w), with everything else that torch.func can do.
TRANSFORMS = {
    "vmap of vmap": lambda x, w: vmap(vmap(convolve, (0, None)), (0, None))(torch.stack([x, 2 * x]), w[0]),
    "vmap of vmap of grad": lambda x, w: vmap(vmap(grad(loss), (None, 0)), (0, None))(w, x),
    "jacrev": lambda x, w: jacrev(lambda w: vmap(convolve, (0, None))(x, w).square().sum((1, 2, 3, 4)))(w[0]),
    "penalty": lambda x, w: vmap(grad(lambda x: grad(loss)(w[0], x).square().sum()))(x),
    "autograd": lambda x, w: torch.autograd.grad(
        vmap(convolve, (0, None))(x, (leaf := w[0].detach().requires_grad_())).square().sum(), leaf
    )[0],
}  # fmt: skip


def transform(mesh: DeviceMesh, case: tuple[str, Any, int]) -> None:
    name, x_at, samples = case
    torch.manual_seed(0)
    x = torch.randn(samples, 2, 4, 6, 6, dtype=torch.float64)
    w = torch.randn(2, 6, 4, 3, 3, dtype=torch.float64)
    expected = TRANSFORMS[name](x, w)
    with convmesh.enable():
        actual = TRANSFORMS[name](place(x, mesh, (x_at,)), place(w, mesh, ("R",)))
        assert_close(actual.full_tensor(), expected)


@pytest.mark.parametrize("name", TRANSFORMS)
def test_other_transforms(pool: Pool, name: str) -> None:
    pool.run_cases(transform, [(name, 0, 4), (name, 0, 3), (name, 4, 3)], mesh=(2,))


def compiled(mesh: DeviceMesh, case: Sharded) -> None:
    (x, w), (x_at, w_at) = case.tensors(), case.layouts()
    function = KINDS[case.kind][0]
    with convmesh.enable():
        torch.compiler.reset()
        actual = torch.compile(function, backend="aot_eager")(place(x, mesh, x_at), place(w, mesh, w_at))
        assert_close(actual.full_tensor(), function(x, w))


def test_compiled(pool: Pool) -> None:
    kinds = ("both", "per-sample gradients", "gradient through vmap")
    pool.run_cases(compiled, [Sharded(kind, (place,), 5) for kind in kinds for place in ("mapped", "width")], mesh=(2,))


# Over a table [V D] or [B V D], and indices [B n]: torch's own rules for these make indices beside them.
LOOKUPS = {
    "one table": lambda table, i: vmap(F.embedding, (0, None))(i, table[0]),
    "a table for each": lambda table, i: vmap(F.embedding)(i, table),
    "one list of indices": lambda table, i: vmap(F.embedding, (None, 0))(i[0], table),
    "gradients of tables": lambda table, i: vmap(grad(lambda t, i: F.embedding(i, t).square().sum()))(table, i),
    "one-hot": lambda table, i: vmap(lambda i, t: F.one_hot(i, 7).to(t.dtype) @ t)(i, table),
}


def look_up(mesh: DeviceMesh, case: tuple[str, Any, Any]) -> None:
    name, table_at, at = case
    torch.manual_seed(0)
    table, indices = torch.randn(3, 7, 4, dtype=torch.float64), torch.randint(0, 7, (3, 5))
    with convmesh.enable():
        actual = LOOKUPS[name](place(table, mesh, (table_at,)), place(indices, mesh, (at,)))
        assert_close(actual.full_tensor(), LOOKUPS[name](table, indices))


@pytest.mark.parametrize("name", LOOKUPS)
def test_tables_and_indices(pool: Pool, name: str) -> None:
    pool.run_cases(look_up, [(name, table_at, at) for table_at in ("R", 0, 1, 2) for at in ("R", 0, 1)], mesh=(2,))


def plain_table(mesh: DeviceMesh) -> None:
    table, indices = torch.randn(3, 7, 4), torch.randint(0, 7, (3, 5))
    with convmesh.enable(), pytest.raises(convmesh.ShardingError, match=r"plain torch.Tensor beside DTensors"):
        vmap(F.embedding)(place(indices, mesh, (0,)), table)


def test_a_plain_table_is_no_constant(pool: Pool) -> None:
    pool.run(plain_table, mesh=(2,))
