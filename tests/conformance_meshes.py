"""How many cases of conformance came out how on large meshes: a record of it, and the last part of the page."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.conformance_record import digest

FILE = Path(__file__).with_suffix(".json")
PAGE = Path(__file__).parents[1] / "docs/conformance.md"
TITLE = "## On large meshes"


def update(mesh: str, most: int, operators: int, counts: dict[str, int]) -> None:
    """Put on record, and on the page, what a mesh such as 4x4x4 made of at most so many samples of each operator."""
    about = {"of": digest().split(", ")[1], "operators": operators, "most": most}
    FILE.write_text(json.dumps(_recorded() | {mesh: {**about, "counts": counts}}, indent=1) + "\n")
    PAGE.write_text(PAGE.read_text().partition(f"\n{TITLE}")[0] + section())


def _recorded() -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = json.loads(FILE.read_text()) if FILE.exists() else {}
    return found


def section() -> str:
    """Nothing as long as no mesh is on record."""
    meshes = _recorded()
    if not meshes:
        return ""
    verdicts = next(iter(meshes.values()))["counts"]
    head = ["mesh", "operators", "samples of each, at most", *verdicts, "of"]
    lines = [
        "",
        TITLE,
        "",
        "On simulated ranks (`python -m tests.conformance --mesh 4x4x4 --most 1 --update`). The first mesh dimension",
        "is over the dimension at hand, each further one over the one that follows. The samples are small: most are",
        "uneven there, and many ranks own nothing.",
        "",
        f"| {' | '.join(head)} |",
        f"| --- |{' ---: |' * (len(head) - 1)}",
    ]
    for mesh, found in meshes.items():
        row = (mesh.replace("x", " x "), found["operators"], found["most"], *found["counts"].values(), found["of"])
        lines.append(f"| {' | '.join(map(str, row))} |")
    return "\n".join(lines) + "\n"
