"""The harness must find every way in which a rank can fail, and be whole again for the next test."""

import os
import signal
import sys
import time
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from tests import harness
from tests.harness import PATIENCE, Pool, RankDied, RankError, RankHung

# So long that who waits for it never comes to an end.
DAYS = 1e6 / PATIENCE


def rank_and_coordinate(mesh: DeviceMesh) -> tuple[int, tuple[int, ...]]:
    return dist.get_rank(), tuple(mesh.get_coordinate() or ())


def sum_along(mesh: DeviceMesh, dim: int) -> float:
    value = torch.tensor([10.0 ** dist.get_rank()])
    dist.all_reduce(value, group=mesh.get_group(dim))
    return value.item()


def several_tensors(mesh: DeviceMesh, offset: torch.Tensor) -> dict[str, Any]:
    half = torch.full((2, 3), dist.get_rank(), dtype=torch.bfloat16)
    return {"sum": offset + dist.get_rank(), "list": [half.T, None], "names": mesh.mesh_dim_names}


def identity_of_mesh(mesh: DeviceMesh) -> int:
    return id(mesh)


def raise_on(mesh: DeviceMesh, ranks: tuple[int, ...], then_reduce: bool = False) -> None:
    if dist.get_rank() in ranks:
        raise ValueError(f"no good on rank {dist.get_rank()}")
    if then_reduce:
        sum_along(mesh, 0)


def raise_everywhere(mesh: DeviceMesh) -> None:
    raise ValueError("no good anywhere")


def exit_python(mesh: DeviceMesh) -> None:
    sys.exit("leaving")


def warn(mesh: DeviceMesh) -> None:
    warnings.warn("careful", UserWarning, stacklevel=1)


def die(mesh: DeviceMesh, rank: int, by_signal: bool) -> None:
    if dist.get_rank() == rank:
        if by_signal:
            os.kill(os.getpid(), signal.SIGKILL)
        os._exit(7)
    sum_along(mesh, 0)


def hang(mesh: DeviceMesh, rank: int) -> None:
    if dist.get_rank() == rank:
        time.sleep(1000)


def unpicklable_result(mesh: DeviceMesh) -> Any:
    return lambda: None


def reciprocal(mesh: DeviceMesh, case: int) -> float:
    return sum_along(mesh, 0) / case


def assert_works(pool: Pool) -> None:
    assert pool.run(sum_along, 0, mesh=(4,)) == [1111.0] * 4
    assert pool.run(sum_along, 1, mesh=(2, 2)) == [11.0, 11.0, 1100.0, 1100.0]


@pytest.mark.parametrize("shape", [(1,), (2,), (3,), (4,), (2, 2), (1, 4), (4, 1), (2, 1), (1, 2, 2)])
def test_results_come_in_mesh_order(pool: Pool, shape: tuple[int, ...]) -> None:
    grid = torch.arange(torch.Size(shape).numel()).reshape(shape)
    assert pool.run(rank_and_coordinate, mesh=shape) == [
        (rank, tuple((grid == rank).nonzero()[0].tolist())) for rank in range(grid.numel())
    ]


@pytest.mark.parametrize(
    ("shape", "ranks", "dim", "sums"),
    [
        ((4,), None, 0, [1111.0] * 4),
        ((3,), None, 0, [111.0] * 3),
        ((2, 2), None, 0, [101.0, 1010.0, 101.0, 1010.0]),
        ((2, 2), (3, 1, 0, 2), 1, [1010.0, 1010.0, 101.0, 101.0]),
        ((4, 1), None, 1, [1.0, 10.0, 100.0, 1000.0]),
        ((2,), (1, 3), 0, [1010.0] * 2),
        ((1, 2), (3, 2), 1, [1100.0] * 2),
    ],
)
def test_collectives_stay_in_the_mesh(
    pool: Pool, shape: tuple[int, ...], ranks: tuple[int, ...] | None, dim: int, sums: list[float]
) -> None:
    assert pool.run(sum_along, dim, mesh=shape, ranks=ranks) == sums


def test_explicit_ranks_give_the_order(pool: Pool) -> None:
    assert [rank for rank, _ in pool.run(rank_and_coordinate, mesh=(2,), ranks=(1, 3))] == [1, 3]
    assert [rank for rank, _ in pool.run(rank_and_coordinate, mesh=(3,), ranks=(2, 0, 1))] == [2, 0, 1]


@pytest.mark.parametrize(("shape", "ranks"), [((5,), None), ((2,), (0,)), ((2,), (1, 1)), ((1,), (4,)), ((1,), (-1,))])
def test_impossible_meshes_are_refused(pool: Pool, shape: tuple[int, ...], ranks: tuple[int, ...] | None) -> None:
    with pytest.raises(ValueError, match="distinct ranks below 4"):
        pool.run(rank_and_coordinate, mesh=shape, ranks=ranks)


def test_meshes_are_made_once(pool: Pool) -> None:
    first = pool.run(identity_of_mesh, mesh=(2, 2))
    assert pool.run(identity_of_mesh, mesh=(2, 2)) == first
    assert pool.run(identity_of_mesh, mesh=(2, 2), names=("h", "w")) != first


def test_arguments_and_results_contain_tensors(pool: Pool) -> None:
    offset = torch.tensor([[0.5, -0.0]], dtype=torch.float64)
    results = pool.run(several_tensors, offset, mesh=(2,), ranks=(1, 3), names=("h",))
    for rank, result in zip((1, 3), results, strict=True):
        assert torch.equal(result["sum"], offset + rank)
        assert result["list"][0].dtype == torch.bfloat16
        assert torch.equal(result["list"][0], torch.full((3, 2), rank, dtype=torch.bfloat16))
        assert result["list"][1] is None
        assert result["names"] == ("h",)


def test_one_raising_rank_while_others_return(pool: Pool) -> None:
    with pytest.raises(RankError, match="raise_on: rank 2 raised") as caught:
        pool.run(raise_on, (2,))
    assert caught.value.rank == 2
    assert "in raise_on" in caught.value.traceback
    assert "ValueError: no good on rank 2" in caught.value.traceback
    assert_works(pool)


def test_one_raising_rank_while_others_wait_for_it(pool: Pool) -> None:
    with pytest.raises(RankError, match="no good on rank 1") as caught:
        pool.run(raise_on, (1,), True, mesh=(4,), timeout=DAYS)
    assert caught.value.rank == 1
    assert "ranks 0, 2, 3 had not returned" in str(caught.value)
    assert "in all_reduce" in str(caught.value)
    assert_works(pool)


def test_all_ranks_raise_and_the_same_processes_go_on(pool: Pool) -> None:
    assert_works(pool)
    before = pool.pids
    with pytest.raises(RankError, match="raise_everywhere: ranks 0, 1, 2, 3 raised") as caught:
        pool.run(raise_everywhere)
    assert str(caught.value).count("Traceback") == 1
    with pytest.raises(RankError, match="no good on rank 1") as caught:
        pool.run(raise_on, (1, 3), mesh=(2,), ranks=(1, 3))
    assert "rank 1 raised:\nTraceback" in str(caught.value)
    assert "rank 3 raised:\nTraceback" in str(caught.value)
    assert_works(pool)
    assert pool.pids == before


@pytest.mark.parametrize(
    ("fn", "text"),
    [(warn, "UserWarning: careful"), (exit_python, "SystemExit: leaving"), (unpicklable_result, "pickle")],
)
def test_other_ways_to_raise(pool: Pool, fn: Any, text: str) -> None:
    with pytest.raises(RankError, match=text):
        pool.run(fn)
    assert_works(pool)


@pytest.mark.parametrize(("by_signal", "code"), [(False, 7), (True, -9)])
def test_a_dying_rank(pool: Pool, by_signal: bool, code: int) -> None:
    assert_works(pool)
    with pytest.raises(RankDied, match=rf"test_harness\.die: rank 1 died \(exit code {code}\)") as caught:
        pool.run(die, 1, by_signal, mesh=(4,), timeout=DAYS)
    assert caught.value.rank == 1
    assert_works(pool)


def test_a_hanging_rank(pool: Pool) -> None:
    assert_works(pool)
    with pytest.raises(RankHung, match=rf"hang: rank 3 had not returned after {3 * PATIENCE:g} s") as caught:
        pool.run(hang, 3, timeout=3)
    assert caught.value.rank == 3
    assert "in hang" in caught.value.traceback
    assert_works(pool)


def test_a_pool_that_does_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes that are still importing have no stack to show, and nothing that a signal could ask for it."""
    monkeypatch.setattr(harness, "START_SECONDS", 0.01)
    with Pool() as late:
        with pytest.raises(
            RankHung, match=rf"the start of the pool: ranks 0, 1, 2, 3 had not returned after {0.01 * PATIENCE:g} s"
        ) as caught:
            late.run(rank_and_coordinate)
        assert str(caught.value).count("had not begun") == 4
        assert not late.pids


def test_a_rank_that_died_between_calls(pool: Pool) -> None:
    assert_works(pool)
    victim = pool._workers[2].process
    victim.kill()
    victim.join()
    assert_works(pool)


def test_run_cases(pool: Pool) -> None:
    assert pool.run_cases(reciprocal, [1, 10], mesh=(2,), ranks=(1, 3)) == [[1010.0] * 2, [101.0] * 2]
    assert pool.run_cases(reciprocal, []) == []


def test_run_cases_reports_the_case(pool: Pool) -> None:
    with pytest.raises(RankError, match="reciprocal: ranks 0, 1, 2, 3 raised") as caught:
        pool.run_cases(reciprocal, [1, 0, 2])
    assert "ZeroDivisionError" in str(caught.value)
    assert "in case 1: 0" in str(caught.value)
    assert_works(pool)
