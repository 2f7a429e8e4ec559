"""A representative part of the conformance run: nothing is wrong, and nothing fails but with a ShardingError."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.conformance import FAULTS, RANKS, run
from tests.harness import Pool
from tests.opinfo import FAMILIES, cases

MOST = 16  # cases of a family on each number of ranks


@pytest.mark.parametrize("family", FAMILIES)
def test_samples_of_torch(pool: Pool, family: str) -> None:
    counts: Counter[str] = Counter()
    faults = []
    for ranks in RANKS:
        some = list(cases(family, 3))
        step = max(1, len(some) // MOST)
        for case, (verdict, reason) in run(pool, family, some[ranks % step :: step], ranks):
            counts[verdict] += 1
            if verdict in FAULTS:
                faults.append(f"{verdict}: {case}, {ranks} ranks: {reason[:300]}")
    assert counts["right"], "the samples were found"
    assert not faults, "\n".join(faults)
