"""What conformance found last: the cases that are gathered or refused, and of which code that was said.

All other cases are right. A run of some of them is compared with what is on record of these.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

import torch

import convmesh
from tests.opinfo import Case

FILE = Path(__file__).with_name("conformance_record.txt")
SOURCE = Path(convmesh.__file__).parent
# What may be on record, from better to worse.
ORDER = ("right", "gathered", "refused")


def digest() -> str:
    """Of which code a result is: the version, and a number that changes with any line of the library."""
    files = sorted(file for file in SOURCE.rglob("*") if file.suffix in (".py", ".cpp", ".h"))
    total = hashlib.sha256()
    for file in files:
        total.update(file.relative_to(SOURCE).as_posix().encode() + b"\0" + file.read_bytes() + b"\0")
    return f"convmesh {convmesh.__version__}, source {total.hexdigest()[:12]}, torch {_release()}"


def _release() -> str:
    return torch.__version__.partition("+")[0]


@dataclass
class Record:
    """Verdicts by case, and the torch release whose samples they are about: others have other samples."""

    release: str = field(default_factory=_release)
    verdicts: dict[tuple[str, str], str] = field(default_factory=dict)  # by the operator, and by the sample of it

    def add(self, case: Case, ranks: int, verdict: str) -> None:
        name = f"{case.operator}{'_' if case.in_place else ''}{f':{case.variant}' if case.variant else ''}"
        if verdict in ORDER:
            self.verdicts[name, f"{case.sample}.{case.dim}@{ranks}"] = verdict

    @classmethod
    def load(cls) -> Self:
        lines = FILE.read_text().splitlines()
        record = cls(lines[0].removeprefix("torch "))
        for line in lines[1:]:
            verdict, name, *samples = line.split()
            record.verdicts |= {(name, sample): verdict for sample in samples}
        return record

    def save(self) -> None:
        lines = defaultdict(list)
        for (name, sample), verdict in self.verdicts.items():
            lines[verdict, name].append(sample)
        text = [
            f"torch {self.release}",
            *(f"{verdict} {name} {' '.join(s)}" for (verdict, name), s in sorted(lines.items())),
        ]
        FILE.write_text("\n".join(text) + "\n")

    def updated(self, found: Record) -> Record:
        """With what was found of the cases that ran, and what is on record of all others."""
        kept = self.verdicts if self.release == found.release else {}
        verdicts = {key: verdict for key, verdict in (kept | found.verdicts).items() if verdict != "right"}
        return Record(found.release, dict(sorted(verdicts.items())))

    def changes(self, found: Record) -> list[str]:
        """What is not as it is on record; nothing where that is about other samples."""
        return list(self._changes(found)) if self.release == found.release else []

    def _changes(self, found: Record) -> Iterator[str]:
        for (name, sample), verdict in found.verdicts.items():
            before = self.verdicts.get((name, sample), "right")
            if ORDER.index(verdict) > ORDER.index(before):
                yield f"{name} {sample} was {before} and is {verdict}"
            elif verdict != before:
                yield f"{name} {sample} was {before} and is {verdict}: say so with --update"
