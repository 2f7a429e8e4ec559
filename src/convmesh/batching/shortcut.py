"""Calls for which torch's own rule is the best, found again by one look-up.

Between two operators that stream through megabytes nothing of Python is left in a processor's caches: a rule's
few dozen microseconds become a few hundred then. So a call that was left to torch before goes there straight away.

There it is watched whether torch gets its memory anew each time, page by page. That may take longer than the
arithmetic, and depends on all that a process does beside: it can be seen, but not foreseen. Where it goes on, those
algorithms win whose results are in memory that is kept (`memory`).
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

# So many calls in a row, the first one ever among them, get memory anew before something is done about it.
IN_A_ROW = 3
# Fewer bytes take no longer than a few calls from Python.
NOTABLE = 4 * 2**20


class Watch:
    """Torch's own rule for some tasks of one kind of call; `whole` if it has no others."""

    def __init__(self, key: Hashable, tasks: Sequence[Task], whole: bool) -> None:
        self.whole = whole
        self._key, self._tasks = key, tasks
        self._matters, self._in_a_row = _matters(tasks), 0

    def __call__(self, rule: Callable[..., Any], *args: Any) -> Any:
        if not self._matters:
            return rule(*args)
        before = gotten_anew()
        result = rule(*args)
        self._see(gotten_anew() - before)
        return result

    def _see(self, anew: int) -> None:
        self._in_a_row = self._in_a_row + 1 if anew >= NOTABLE else 0
        if self._in_a_row == IN_A_ROW:
            choice.reconsider(self._tasks, anew)
            _left_to_torch.pop(self._key, None)


_left_to_torch: dict[Hashable, Watch] = {}


def key_of(operands: Sequence[torch.Tensor | None], *arguments: Hashable) -> Hashable:
    """All that a choice among algorithms depends on; None where tensors are not plain ones, or somebody watches."""
    laid = None if choice.is_watched() else description(operands)
    return None if laid is None else (laid, arguments, torch.get_num_threads())


def left_to_torch(key: Hashable) -> Watch | None:
    """Torch's rule, if such a call was left to it before, and nothing has to be asked any more."""
    watch = _left_to_torch.get(key)
    return watch if watch is not None and watch.whole else None


def leave_to_torch(key: Hashable, tasks: Sequence[Task], whole: bool) -> Watch:
    """What runs torch's rule for these tasks of a call."""
    watch = _left_to_torch.get(key)
    if watch is None:
        watch = Watch(key, tasks, whole)
        if key is not None:
            if len(_left_to_torch) >= LONGEST:
                _left_to_torch.clear()
            _left_to_torch[key] = watch
    return watch


def _matters(tasks: Sequence[Task]) -> bool:
    """Whether memory is to be watched. Who asks for the same bits in every run gets them: it is not, then."""
    if torch.are_deterministic_algorithms_enabled() or choice.was_reconsidered(tasks):
        return False
    return all(task.device == "cpu" for task in tasks) and sum(map(_bytes_of, tasks)) >= NOTABLE


def _bytes_of(task: Task) -> int:
    """Of all operands and the result, as a fold may lay them out."""
    return task.batch * task.itemsize * sum(prod(task.contraction.shape(role)) for role in Role)


choice.when_forgotten(_left_to_torch.clear)
