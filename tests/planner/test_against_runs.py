"""Bytes and messages of a plan are those of a run, and its peak is the run's: some cases of `against_runs`."""

from __future__ import annotations

import pytest

from tests.harness import Pool
from tests.planner.against_runs import MESHES, OF_EIGHT, Case, Counts, differences, on_processes, planned, simulated
from tests.planner.networks import NETWORKS


def check(runs: list[Counts], plans: list[Counts]) -> None:
    same, apart = differences(runs, plans)
    assert same
    assert apart < 0.05


@pytest.mark.parametrize("name", NETWORKS)
def test_four_ranks(name: str) -> None:
    case = Case(name, MESHES[2])
    runs = simulated(case)
    check([runs[0], runs[3]], [planned(case, 0), planned(case, 3)])


def test_eight_ranks() -> None:
    case = Case("unet3d", OF_EIGHT[3])
    runs = simulated(case)
    check([runs[0], runs[5]], [planned(case, 0), planned(case, 5)])


@pytest.mark.parametrize(
    "case", [Case("unet2d", MESHES[0]), Case("unet2d", MESHES[1]), Case("unet2d", MESHES[1], "bf16"),
             Case("unet2d", MESHES[1], checkpoints=True), Case("unet2d", MESHES[1], "bf16", checkpoints=True)], ids=str,
)  # fmt: skip
def test_processes(pool: Pool, case: Case) -> None:
    runs = on_processes(pool, case)
    check(runs, [planned(case, rank) for rank in range(len(runs))])
