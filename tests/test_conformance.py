"""A representative part of the conformance run: nothing is wrong, nothing fails but with a ShardingError, and what was
right is neither gathered nor refused."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from tests import conformance_record
from tests.conformance import RANKS, in_markdown, run
from tests.conformance_record import Record, digest
from tests.conformance_verdict import FAULTS
from tests.harness import Pool
from tests.opinfo import FAMILIES, Case, cases
from tests.simulated import Simulated

MOST = 16  # cases of a family on each number of ranks
FEW = 6  # on simulated ranks


@pytest.mark.parametrize("family", FAMILIES)
def test_samples_of_torch(pool: Pool, family: str) -> None:
    counts: Counter[str] = Counter()
    faults = []
    found = Record()
    for ranks in RANKS:
        some = list(cases(family, 3))
        step = max(1, len(some) // MOST)
        for case, (verdict, reason) in run(pool, family, some[ranks % step :: step], ranks):
            counts[verdict] += 1
            found.add(case, ranks, verdict)
            if verdict in FAULTS:
                faults.append(f"{verdict}: {case}, {ranks} ranks: {reason[:300]}")
    assert counts["right"], "the samples were found"
    assert not faults, "\n".join(faults)
    assert not Record.load().changes(found)


@pytest.mark.parametrize("family", FAMILIES)
def test_samples_of_torch_on_a_mesh_of_three_dimensions(family: str) -> None:
    """Of simulated ranks. The samples are small: some ranks own nothing."""
    some = list(cases(family, 1))
    verdicts = dict(run(Simulated((2, 2, 2)), family, some[:: max(1, len(some) // FEW)], 8))
    assert verdicts
    assert not {str(case): told for case, told in verdicts.items() if told[0] in FAULTS}


def recorded(**verdicts: str) -> Record:
    record = Record()
    for operator, verdict in verdicts.items():
        record.add(Case(operator, "", False, 3, 1), 2, verdict)
    return record


def test_the_record_is_a_ratchet(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    before = recorded(a="gathered", b="gathered", c="refused", d="gathered", e="gathered").updated(Record())
    found = recorded(a="gathered", b="right", c="gathered", d="refused", f="refused", g="right", h="wrong")
    assert before.changes(found) == [
        "b 3.1@2 was gathered and is right: say so with --update",
        "c 3.1@2 was refused and is gathered: say so with --update",
        "d 3.1@2 was gathered and is refused",
        "f 3.1@2 was right and is refused",
    ]
    after = before.updated(found)
    assert not after.changes(found)
    monkeypatch.setattr(conformance_record, "FILE", tmp_path / "record.txt")
    after.save()
    assert Record.load() == after == recorded(a="gathered", c="gathered", d="refused", e="gathered", f="refused")


def test_the_digest_is_of_every_line_of_the_library(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = tmp_path / "ops" / "one.py"
    file.parent.mkdir()
    file.write_text("1")
    monkeypatch.setattr(conformance_record, "SOURCE", tmp_path)
    first = digest()
    assert first in in_markdown({}, stock=False)
    file.write_text("2")
    assert digest() != first
    file.rename(file.with_name("two.py"))
    assert digest() != first
