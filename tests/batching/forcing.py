"""Running a function by an algorithm of one's choice, and only where that algorithm applies."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from convmesh import batching
from convmesh.batching.algorithms import Task
from convmesh.batching.choice import ALGORITHMS

# For the products of a function to which the algorithm in question does not apply: one of them always does.
FOLDS = ("fold-n", "fold-o", "fold-c", "fold-groups")


def tasks_of(function: Callable[..., Any], *args: Any) -> list[Task]:
    """The products that it computes."""
    return [decision.task for decision in batching.explain(function, *args)]


def that_apply(function: Callable[..., Any], *args: Any, to: Callable[[Any], bool] = all) -> list[str]:
    """The algorithms that apply to all of its products, or to any."""
    tasks = tasks_of(function, *args)
    return [each.name for each in ALGORITHMS if tasks and to(each.applies(task) for task in tasks)]


def by(name: str, function: Callable[..., Any], *args: Any) -> Any:
    """What it gives where each product is computed by this algorithm, or else folded; one at least is."""
    results: list[Any] = []
    with batching.force(name, *FOLDS):
        decisions = batching.explain(lambda: results.append(function(*args)))
    assert name in {decision.algorithm.name for decision in decisions}
    assert all(decision.algorithm.name in (name, *FOLDS) for decision in decisions)
    return results[0]


def by_each(function: Callable[..., Any], *args: Any) -> dict[str, Any]:
    """By every algorithm that applies somewhere in it."""
    found = {name: by(name, function, *args) for name in that_apply(function, *args, to=any)}
    assert found
    return found
