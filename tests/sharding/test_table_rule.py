"""Rules that are a table: what the decorator does for all of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import Placement

import convmesh
from convmesh import _torch
from convmesh.sharding.errors import Unfit
from convmesh.sharding.layout import Layout
from convmesh.sharding.sharding_table import P, R, Row, counted_from_start, elementwise_rows
from tests.compare import assert_close
from tests.harness import Pool

aten = torch.ops.aten
SHAPE = (5, 3, 6)  # uneven on two ranks, and of four the last have less or nothing


def values(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_the_operator_in_contributing_is_the_one_in_the_library() -> None:
    root = Path(__file__).parents[2]
    source = (root / "src/convmesh/ops/linalg/cdist.py").read_text()
    assert source in (root / "CONTRIBUTING.md").read_text()
    assert len(source.splitlines()) <= 60


def test_rows_are_counted_from_the_start() -> None:
    row = Row("", (Shard(-2), R, Shard(1)), (Shard(-1), Shard(2), P))
    assert counted_from_start(row, (4, None, 2), (3, 1, 2)) == Row("", (Shard(2), R, Shard(1)), (Shard(2), R, P))


def check_elementwise_rows(mesh: DeviceMesh) -> None:
    x, w = (Layout.of(_torch.spec_of(distribute_tensor(values(*size), mesh, [R]))) for size in (SHAPE, (3, 1)))
    rows = list(elementwise_rows((x, None, w), results=2))
    assert rows[1:] == [
        Row("elementwise", (Shard(0), R, R), (Shard(0), Shard(0))),
        Row("elementwise", (Shard(1), R, Shard(0)), (Shard(1), Shard(1))),
        Row("elementwise", (Shard(2), R, R), (Shard(2), Shard(2))),
    ]
    with pytest.raises(Unfit):
        list(elementwise_rows((x, x.new((4,)))))


def test_elementwise_rows(pool: Pool) -> None:
    pool.run(check_elementwise_rows, mesh=(2,))


def placed(tensor: torch.Tensor, mesh: DeviceMesh, placement: Placement) -> DTensor:
    if isinstance(placement, Partial):
        share = tensor / mesh.size()
        return DTensor.from_local(share, mesh, [placement], run_check=False)
    return distribute_tensor(tensor, mesh, [placement])


def check_every_placement(mesh: DeviceMesh) -> None:
    """Every operand at every placement, twice: the second call finds its plan."""
    x, other, indices, table = values(*SHAPE), values(5, 4, 6, seed=1), torch.arange(15).view(5, 3) % 7, values(7, 4)
    expected = torch.cdist(x, other), aten.log_sigmoid_forward.default(x)[0], F.embedding(indices, table)
    with convmesh.enable():
        for _ in range(2):
            for one in (R, P, Shard(0), Shard(1), Shard(2)):
                a = placed(x, mesh, one)
                assert_close(aten.log_sigmoid_forward.default(a)[0].full_tensor(), expected[1])
                for another in (R, P, Shard(0), Shard(1), Shard(2)):
                    found: Any = torch.cdist(a, placed(other, mesh, another))
                    assert_close(found.full_tensor(), expected[0])
            for at in (R, Shard(0), Shard(1)):
                for rows in (R, P, Shard(0), Shard(1)):
                    found = F.embedding(placed(indices, mesh, at), placed(table, mesh, rows))
                    assert_close(found.full_tensor(), expected[2])


@pytest.mark.parametrize("size", [2, 4])
def test_every_placement(pool: Pool, size: int) -> None:
    pool.run(check_every_placement, mesh=(size,))


def check_refusals(mesh: DeviceMesh) -> list[str]:
    told = []
    x, short = (distribute_tensor(values(*size), mesh, [Shard(0)]) for size in (SHAPE, (5, 2, 6)))
    wrong = DTensor.from_local(
        values(3, 3, 6), mesh, [Shard(0)], run_check=False, shape=torch.Size(SHAPE), stride=(18, 6, 1)
    )
    with convmesh.enable():
        for call in (
            lambda: aten.mse_loss.default(x, short),
            lambda: torch.cdist(x, values(5, 2, 6)),
            lambda: aten.log_sigmoid_forward.default(wrong),
        ):
            try:
                call()
                told.append("")
            except convmesh.ShardingError as error:
                told.append(str(error))
    return told


def test_refusals_are_the_same_on_all_ranks_and_name_the_tensors(pool: Pool) -> None:
    by_rank = pool.run(check_refusals, mesh=(2,))
    assert all("(5, 2, 6)" in told[0] and "mse_loss" in told[0] for told in by_rank)
    assert all("plain torch.Tensor beside DTensors: x2" in told[1] for told in by_rank)
    # Five rows are three and two: of the first rank the local tensor is as it should be.
    assert [bool(told[2]) for told in by_rank] == [False, True]


def check_left_out(world: DeviceMesh) -> tuple[bool, tuple[int, ...]]:
    mesh = DeviceMesh("cpu", torch.tensor([1, 3]))
    with convmesh.enable():
        x = distribute_tensor(values(*SHAPE), mesh, [Shard(0)])
        for _ in range(2):
            y, buffer = aten.log_sigmoid_forward.default(x)
    assert y.shape == buffer.shape == x.shape
    return mesh.get_coordinate() is not None, tuple(y.to_local().shape)


def test_a_rank_outside_of_the_mesh_returns_nothing(pool: Pool) -> None:
    assert pool.run(check_left_out, mesh=(4,)) == [(False, (0,)), (True, (3, 3, 6)), (False, (0,)), (True, (2, 3, 6))]


def check_meshes_that_come_and_go(mesh: DeviceMesh) -> None:
    """A plan is of its mesh, and an equal one is no excuse for another layout."""
    x = values(4, 3, 6)
    with convmesh.enable():
        for placement in (Shard(0), Replicate(), Shard(2)):
            for again in (mesh, DeviceMesh("cpu", mesh.mesh)):
                y = aten.log_sigmoid_forward.default(distribute_tensor(x, again, [placement]))[0]
                assert y.device_mesh == again
                assert y.placements == (placement,)
                assert_close(y.full_tensor(), F.logsigmoid(x))


def test_plans_are_of_a_mesh_and_placements(pool: Pool) -> None:
    pool.run(check_meshes_that_come_and_go, mesh=(4,))  # all ranks of the pool: they make the groups together
