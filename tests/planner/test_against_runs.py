"""Bytes and messages of a plan are those of a run, and its peak is the run's: the cases of `against_runs`, smaller."""

from __future__ import annotations

import pytest

from tests.harness import Pool
from tests.planner.against_runs import Case, Counts, differences, meshes, on_processes, planned, simulated
from tests.planner.networks import NETWORKS


def check(runs: list[Counts], plans: list[Counts]) -> None:
    same, apart = differences(runs, plans)
    assert same
    assert apart < 0.05


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
@pytest.mark.parametrize("name", NETWORKS)
def test_on_simulated_ranks(name: str, ranks: int) -> None:
    case = Case(name, meshes(name)[ranks.bit_length() - 1])
    runs = simulated(case, steps=1)
    some = sorted({0, ranks // 2})
    check([runs[rank] for rank in some], [planned(case, rank, steps=1) for rank in some])


@pytest.mark.parametrize(
    "case", [Case("unet2d", {"h": 2}), Case("unet2d", {"h": 2}, "bf16"), Case("unet2d", {"h": 2}, checkpoints=True),
             Case("unet2d", {"h": 2}, "bf16", checkpoints=True)], ids=str,
)  # fmt: skip
def test_on_processes(pool: Pool, case: Case) -> None:
    runs = on_processes(pool, case)
    check(runs, [planned(case, rank) for rank in range(len(runs))])
