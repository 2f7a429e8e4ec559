"""The notebooks in `examples/`, run cell by cell: what a reader sees in the file is what comes out."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.notebooks import run

NOTEBOOKS = sorted((Path(__file__).parent.parent / "examples").glob("*.ipynb"))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_shows_what_it_does(path: Path) -> None:
    assert run(path) == json.loads(path.read_text()), f"python -m tests.notebooks {path}"


def test_there_are_notebooks() -> None:
    assert NOTEBOOKS
