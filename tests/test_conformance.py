"""A representative part of the conformance run: nothing that is ours is wrong."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.conformance import FAMILIES, RANKS, cases, run
from tests.harness import Pool


@pytest.mark.parametrize("family", [name for name, family in FAMILIES.items() if family.ours])
def test_samples_of_torch(pool: Pool, family: str) -> None:
    counts: Counter[str] = Counter()
    wrong = []
    for ranks in RANKS:
        for case, verdict, reason in run(pool, list(cases(family, 3))[ranks // 4 :: 2], ranks):
            counts[verdict] += 1
            if verdict in ("wrong", "error"):
                wrong.append(f"{verdict}: {case} over {ranks} ranks: {reason[:300]}")
    assert counts["right"], "the samples were found"
    assert not wrong, "\n".join(wrong)
