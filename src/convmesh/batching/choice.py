"""Which algorithm a task gets, and why."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from . import cost
from ._functorch import Nature
from .algorithms import Algorithm, Exchange, Fold, FoldGroups, Loop, Task
from .patches import Taps, Unfold
from .pointwise import Pointwise

# In the order of preference where estimates are equal: the folds, which apply to anything, come first.
ALGORITHMS: tuple[Algorithm, ...] = (
    Fold("N"),
    Fold("O"),
    Fold("C"),
    FoldGroups(),
    Exchange(),
    Pointwise(),
    Unfold(),
    Taps(),
    Loop(),
)

# An estimate is off by some ten per cent. Leave the fold, which torch itself would take, only for a clear gain.
CLEAR_GAIN = 0.85

log = logging.getLogger("convmesh.batching")
_forced: str | None = None
_listeners: list[list[Decision]] = []


@dataclass(frozen=True)
class Decision:
    task: Task
    algorithm: Algorithm
    reason: str

    def __str__(self) -> str:
        product = self.task.contraction
        first, second = ("[B" if mapped else "[" for mapped in self.task.mapped)
        return (
            f"{product.wanted.name.lower()} of {first}...] x {second}...], B={self.task.batch}, "
            f"image {list(product.image)}, kernel {list(product.kernel)}, response {list(product.response)}, "
            f"groups={product.geometry.groups}: {self.algorithm.name} ({self.reason})"
        )


def choose(task: Task) -> Algorithm:
    """The algorithm for a task; said to the debug log and to `explain`."""
    decision = _forced_decision(task) or (_decide(task) if _is_static(task) else _fold(task, "sizes are symbolic"))
    if _listeners or log.isEnabledFor(logging.DEBUG):
        log.debug("%s", decision)
        for listener in _listeners:
            listener.append(decision)
    return decision.algorithm


@lru_cache(maxsize=4096)
def _decide(task: Task) -> Decision:
    usable = [algorithm for algorithm in ALGORITHMS if algorithm.applies(task)]
    if len(usable) == 1 or task.nature is Nature.OPAQUE:
        return Decision(task, usable[0], "the only one for such operands")
    if usable[0].name == "fold-n":
        return Decision(task, usable[0], "one convolution of a longer batch")
    if task.is_empty or task.batch == 1:
        return Decision(task, usable[0], "nothing to gain")
    table = cost.price_table()
    estimates = {algorithm: table.seconds(algorithm, task) for algorithm in usable}
    known = {algorithm: seconds for algorithm, seconds in estimates.items() if seconds is not None}
    if usable[0] not in known:
        return Decision(task, usable[0], f"no prices for {task.dtype} on {task.device}; calibrate() measures them")
    best = min(known, key=lambda algorithm: known[algorithm])
    if known[best] > CLEAR_GAIN * known[usable[0]]:
        best = usable[0]
    listed = ", ".join(f"{algorithm.name} {1e3 * seconds:.2f} ms" for algorithm, seconds in known.items())
    return Decision(task, best, f"{table.source}: {listed}")


def _forced_decision(task: Task) -> Decision | None:
    for algorithm in ALGORITHMS:
        if algorithm.name == _forced and algorithm.applies(task):
            return Decision(task, algorithm, "forced")
    return None


def _fold(task: Task, reason: str) -> Decision:
    return Decision(task, next(algorithm for algorithm in ALGORITHMS if algorithm.applies(task)), reason)


def _is_static(task: Task) -> bool:
    """Symbolic sizes have no value to estimate with, and asking for one would tie a compiled graph to it."""
    product = task.contraction
    sizes = (task.batch, *product.image, *product.kernel, *product.response)
    return all(isinstance(size, int) for size in sizes)


def forget() -> None:
    """Drop remembered choices, after the prices or a limit have changed."""
    _decide.cache_clear()
    cost.price_table.cache_clear()


@contextmanager
def force(name: str) -> Iterator[None]:
    """Take the algorithm of this name wherever it applies: for tests, measurements and doubts."""
    global _forced
    names = [algorithm.name for algorithm in ALGORITHMS]
    if name not in names:
        raise ValueError(f"no algorithm is called {name!r}; there are {', '.join(names)}")
    previous, _forced = _forced, name
    try:
        yield
    finally:
        _forced = previous


def explain(function: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Decision]:
    """Run `function` and tell, one line for each, how its mapped convolutions were computed and why."""
    decisions: list[Decision] = []
    _listeners.append(decisions)
    try:
        function(*args, **kwargs)
    finally:
        # By identity: two equal lists of decisions may listen at once.
        _listeners[:] = [listener for listener in _listeners if listener is not decisions]
    return decisions
