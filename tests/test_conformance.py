"""A representative part of the conformance run: nothing that is ours is wrong."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.conformance import FAMILIES, RANKS, cases, run
from tests.harness import Pool

MOST = 16  # cases of a family on each number of ranks


@pytest.mark.parametrize("family", [name for name, family in FAMILIES.items() if family.ours])
def test_samples_of_torch(pool: Pool, family: str) -> None:
    counts: Counter[str] = Counter()
    wrong = []
    for ranks in RANKS:
        some = list(cases(family, 3))
        step = max(1, len(some) // MOST)
        for case, verdict, reason in run(pool, some[ranks % step :: step], ranks):
            counts[verdict] += 1
            if verdict in ("wrong", "error"):
                wrong.append(f"{verdict}: {case} over {ranks} ranks: {reason[:300]}")
    assert counts["right"], "the samples were found"
    assert not wrong, "\n".join(wrong)
