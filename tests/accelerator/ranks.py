"""Running a function on ranks that have the stand-in accelerator."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tests.accelerator import BACKEND
from tests.launch import launch


def results(fn: Callable[..., Any], *args: Any, mesh: tuple[int, ...] = (2,)) -> list[Any]:
    """Of the module-level `fn(mesh, *args)`, by rank; all of them have to return."""
    names = ("h", "w")[: len(mesh)]
    outcomes = launch(fn, *args, mesh=mesh, names=names, backend=BACKEND)
    failed = {outcome.message or f"exit code {outcome.exit_code}" for outcome in outcomes if outcome.exit_code != 0}
    assert not failed, "\n".join(failed)
    return [outcome.result for outcome in outcomes]
