"""Random geometry x dtype x mesh x placements, forward and backward, against one process. More: `make fuzz`."""

from __future__ import annotations

import pytest

from tests.cases import MESHES, check, random_case
from tests.harness import Pool

CASES_PER_MESH = 20  # times nine meshes


@pytest.mark.parametrize("mesh", MESHES, ids=lambda mesh: "x".join(map(str, mesh)))
def test_random_convolutions(pool: Pool, mesh: tuple[int, ...]) -> None:
    first = 1000 * MESHES.index(mesh)
    pool.run_cases(check, [random_case(first + n, mesh) for n in range(CASES_PER_MESH)], mesh=mesh)


def test_on_ranks_that_are_not_the_start_of_the_world(pool: Pool) -> None:
    pool.run_cases(check, [random_case(9000 + n, (2,)) for n in range(12)], mesh=(2,), ranks=(1, 3))
    pool.run_cases(check, [random_case(9500 + n, (3,)) for n in range(12)], mesh=(3,), ranks=(0, 2, 3))
