"""Rows that go where values say arrive, and answers come back where they were asked for."""

from __future__ import annotations

import random

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh

from convmesh.comm import (
    owners,
    rank_line,
    route_rows,
)
from convmesh.geometry import Shards
from tests.comm.schedules import LINES
from tests.compare import assert_close
from tests.harness import Pool


def route(mesh: DeviceMesh, case: tuple[int, tuple[int, ...]]) -> None:
    """Rows arrive in the order of their sources, answers where they were asked for, and both are adjoint."""
    seed, mesh_dims = case
    line = rank_line(mesh, mesh_dims)
    rng = random.Random(seed)
    everyone = [[rng.randrange(line.size) for _ in range(rng.randint(0, 6))] for _ in range(line.size)]
    rows = [torch.randn(len(to), 3, dtype=torch.float64, generator=torch.Generator().manual_seed(seed + rank))
            for rank, to in enumerate(everyone)]  # fmt: skip
    route = route_rows(torch.tensor(everyone[line.rank], dtype=torch.int64), mesh, mesh_dims)
    arrived = route.send(rows[line.rank])
    pairs = zip(rows, everyone, strict=True)
    expected = [row for theirs, to in pairs for row, dst in zip(theirs, to, strict=True) if dst == line.rank]
    assert torch.equal(arrived, torch.stack(expected) if expected else arrived.new_zeros(0, 3))
    assert torch.equal(route.send_back(arrived), rows[line.rank])
    assert route.send(rows[line.rank][:, :0]).shape == (len(expected), 0)
    y = torch.randn(arrived.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed - line.rank))
    both = torch.stack([(arrived * y).sum(), (rows[line.rank] * route.send_back(y)).sum()])
    for group in line.groups:
        torch.distributed.all_reduce(both, group=group)
    assert_close(both[0], both[1], scale=100.0)


@pytest.mark.parametrize(("mesh", "mesh_dims"), LINES)
def test_rows_are_routed_and_answered(pool: Pool, mesh: tuple[int, ...], mesh_dims: tuple[int, ...]) -> None:
    pool.run_cases(route, [(seed, mesh_dims) for seed in range(100, 120)], mesh=mesh)


def lose(mesh: DeviceMesh, mesh_dims: tuple[int, ...]) -> str:
    line = rank_line(mesh, mesh_dims)
    with pytest.raises(IndexError) as caught:
        route_rows(torch.tensor([0, line.size if line.rank == line.size - 1 else 0]), mesh, mesh_dims)
    return str(caught.value)


@pytest.mark.parametrize(("mesh", "mesh_dims"), [((4,), (0,)), ((2, 2), (0, 1))])
def test_a_row_that_goes_nowhere_raises_on_all_ranks(
    pool: Pool, mesh: tuple[int, ...], mesh_dims: tuple[int, ...]
) -> None:
    assert set(pool.run(lose, mesh_dims, mesh=mesh)) == {"1 indices are out of range"}


@pytest.mark.parametrize("mesh_sizes", [(1,), (3,), (7,), (2, 3), (3, 2), (2, 2, 2)])
def test_owners_are_found_by_arithmetic(mesh_sizes: tuple[int, ...]) -> None:
    for size in range(23):
        shards = Shards(size, mesh_sizes)
        rank, start, length = owners(torch.arange(-1, size + 2), shards)
        assert rank[[0, -2, -1]].tolist() == [-1, -1, -1]
        for index in range(size):
            part = shards[int(rank[index + 1])]
            assert index in part
            assert (part.start, len(part)) == (int(start[index + 1]), int(length[index + 1]))
