"""Bytes and messages of a plan are those of a run, and its peak is the run's: some cases of `against_runs`."""

from __future__ import annotations

import pytest

from tests.harness import Pool
from tests.planner.against_runs import MESHES, OF_EIGHT, Case, differences, on_processes, simulated
from tests.planner.networks import NETWORKS


@pytest.mark.parametrize("name", NETWORKS)
def test_four_ranks(name: str) -> None:
    case = Case(name, MESHES[2])
    same, apart = differences(case, simulated(case), [0, 3])
    assert same
    assert apart < 0.05


def test_eight_ranks() -> None:
    case = Case("unet3d", OF_EIGHT[3])
    same, apart = differences(case, simulated(case), [0, 5])
    assert same
    assert apart < 0.05


@pytest.mark.parametrize(
    "case", [Case("unet2d", MESHES[0]), Case("unet2d", MESHES[1]), Case("unet2d", MESHES[1], "bf16"),
             Case("unet2d", MESHES[1], checkpoints=True)], ids=str,
)  # fmt: skip
def test_processes(pool: Pool, case: Case) -> None:
    same, apart = differences(case, on_processes(pool, case))
    assert same
    assert apart < 0.05
