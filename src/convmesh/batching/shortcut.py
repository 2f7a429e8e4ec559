"""Calls for which torch's own rule is the best, found again by one look-up.

Between two operators that stream through megabytes nothing of Python is left in a processor's caches: a rule's
few dozen microseconds become a few hundred then. So a call that was left to torch before goes there straight away.

Before it does so for good, it is seen whether torch gets its memory anew each time, page by page. That may take longer
than the arithmetic, and depends on all that a process does beside: it can be seen, but not foreseen. Those algorithms
win then whose results are in memory that is kept (`memory`).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from math import prod
from typing import Any

import torch

from . import choice
from ._functorch import description
from .algorithms import Task
from .choice import LONGEST
from .contraction import Role
from .memory import gotten_anew

# Calls that are watched. Nothing is learned from the first one: whatever it needs is new.
WATCHED = 3
# Getting fewer bytes anew takes no longer than a few calls from Python.
NOTABLE = 2**20

_left_to_torch: set[Hashable] = set()
_watched: dict[Hashable, list[int]] = {}


def key_of(operands: Sequence[torch.Tensor | None], *arguments: Hashable) -> Hashable:
    """All that a choice among algorithms depends on; None where tensors are not plain ones, or somebody watches."""
    laid = None if choice.is_watched() else description(operands)
    return None if laid is None else (laid, arguments, torch.get_num_threads())


def is_left_to_torch(key: Hashable) -> bool:
    return key in _left_to_torch


def by_torch(key: Hashable, tasks: Sequence[Task], whole: bool, rule: Callable[[], Any]) -> Any:
    """What torch's rule makes of the tasks of a call; if these are the whole call, it goes there by itself soon."""
    if key is None:
        return rule()
    if not _may_matter(tasks):
        _settle(key, whole)
        return rule()
    before = gotten_anew()
    result = rule()
    seen = _watched.setdefault(key, [])
    seen.append(gotten_anew() - before)
    if len(seen) == WATCHED:
        anew = min(seen[1:])
        if anew < NOTABLE:
            _settle(key, whole)
        else:
            choice.reconsider(tasks, anew)
    return result


def _may_matter(tasks: Sequence[Task]) -> bool:
    """Whether memory is still to be watched. Who asks for the same bits in every run gets them: it is not, then."""
    if torch.are_deterministic_algorithms_enabled() or choice.was_reconsidered(tasks):
        return False
    return all(task.device == "cpu" for task in tasks) and sum(map(_bytes_of, tasks)) >= NOTABLE


def _bytes_of(task: Task) -> int:
    """Of all operands and the result, as a fold may lay them out."""
    return task.batch * task.itemsize * sum(prod(task.contraction.shape(role)) for role in Role)


def _settle(key: Hashable, whole: bool) -> None:
    if len(_watched) >= LONGEST or len(_left_to_torch) >= LONGEST:
        _forget()
    _watched.pop(key, None)
    if whole:
        _left_to_torch.add(key)


def _forget() -> None:
    _watched.clear()
    _left_to_torch.clear()


choice.when_forgotten(_forget)
