"""The choice of an algorithm for a task, with its reason."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch

from . import benchmark
from ._functorch import Nature
from .algorithms import Algorithm, Fold, FoldGroups, Loop, Task
from .direct import Direct, Winograd
from .machines import OWN, Ranks
from .patches import Unfold
from .quickest import quickest

# In the order of preference where estimates are equal: the folds, which apply to anything, come first.
ALGORITHMS: tuple[Algorithm, ...] = (
    *(Fold("N"), Fold("O"), Fold("C"), FoldGroups()),
    *(Direct(), Winograd(), Unfold(), Loop()),
)

log = logging.getLogger("convmesh.batching")


@dataclass(frozen=True)
class Settings:
    """The settings made by `enable` and `force`."""

    benchmark: bool = False
    exact: bool = False
    forced: tuple[str, ...] = ()

    @property
    def is_exact(self) -> bool:
        """Whether algorithms that round more than direct convolution are ruled out."""
        return self.exact or torch.are_deterministic_algorithms_enabled()


_settings = Settings()
listeners: list[list[Decision]] = []
_when_forgotten: list[Callable[[], None]] = []


def settings() -> Settings:
    return _settings


def set_settings(wanted: Settings) -> None:
    global _settings
    _settings = wanted


@dataclass(frozen=True)
class Decision:
    task: Task
    algorithm: Algorithm
    reason: str
    as_torch: bool = False  # torch's own rule would do just that

    def __str__(self) -> str:
        return f"{_described(self.task)}: {self.algorithm.name} ({self.reason})"


def _described(task: Task) -> str:
    product = task.contraction
    first, second = ("[B" if mapped else "[" for mapped in task.mapped)
    return (
        f"{product.wanted.name.lower()} of {first}...] x {second}...], B={task.batch}, "
        f"image {list(product.image)}, kernel {list(product.kernel)}, response {list(product.response)}, "
        f"groups={product.geometry.groups}"
    )


def choose(task: Task, *operands: Any, ranks: Ranks | None = None) -> Decision:
    """Return the algorithm for a task, and report it to the debug log and to `explain`.

    A benchmark runs on `operands`. `ranks` are those that compute parts of the same call. The choice is kept: the same
    call gives the same bits.
    """
    decision = _forced(task) if _settings.forced else _measured(task, operands, ranks) if _settings.benchmark else None
    if decision is None:
        static = task.nature is Nature.PLAIN or _is_static(task)
        decision = _listed(task) if static else Decision(task, _usable(task)[0], "sizes are symbolic")
    if is_watched():
        log.debug("%s", decision)
        for listener in listeners:
            listener.append(decision)
    return decision


@lru_cache(maxsize=4096)
def _listed(task: Task) -> Decision:
    """Choose by the list in `quickest.py`; torch's own algorithm without compiled kernels and on other devices."""
    usable = {each.name: each for each in _usable(task)}
    fold = next(iter(usable.values()))
    if task.nature is Nature.OPAQUE:
        name, reason = fold.name, "the only one for such operands"
    elif "direct" not in usable:
        name, reason = fold.name, "as torch does; enable(benchmark=True) would measure others"
    else:
        name, reason = quickest(task, fold.name, "winograd" in usable)
    as_torch = task.nature is Nature.PLAIN and fold.is_torchs_own and name == fold.name
    return Decision(task, usable[name], reason, as_torch)


def _usable(task: Task) -> list[Algorithm]:
    return [each for each in ALGORITHMS if each.applies(task)]


def _measured(task: Task, operands: tuple[Any, ...], ranks: Ranks | None) -> Decision | None:
    """Choose by timing, at the first call with such a task, for `enable(benchmark=True)`.

    Ranks that compute parts of one call take what is fastest on the first of them. Plain tensors are only timed in jobs
    of one process, since other ranks might choose differently.
    """
    if not operands or (ranks is None and task.machine is not OWN):
        return None

    def say() -> str:
        plain = task.nature is Nature.PLAIN and not task.is_empty
        return benchmark.fastest(task, _usable(task), operands) if plain else ""

    said = say() if ranks is None else ranks.by_the_first(say, task.dtype) or ""
    name, _, reason = said.partition(" ")
    # None where the first rank could not tell, or where its part differs so much that its algorithm is none here.
    return next((Decision(task, each, reason) for each in _usable(task) if each.name == name), None)


def attend(ranks: Ranks, task: Task) -> None:
    """Take part in the communication of `choose` on a rank that has no samples."""
    if _settings.benchmark and not _settings.forced:
        ranks.by_the_first(str, task.dtype)


def is_watched() -> bool:
    """Whether choices must not be skipped: an algorithm is forced, or someone listens to them."""
    return bool(_settings.forced) or bool(listeners) or log.isEnabledFor(logging.DEBUG)


def _forced(task: Task) -> Decision:
    usable = {algorithm.name: algorithm for algorithm in _usable(task)}
    for name in _settings.forced:
        if name in usable:
            return Decision(task, usable[name], "forced")
    raise ValueError(
        f"{' or '.join(_settings.forced)} is forced, but does not apply to the {_described(task)}\n"
        f"  remedy: force another one ({', '.join(usable)}), or name some of these, too"
    )


def _is_static(task: Task) -> bool:
    """Whether all sizes are numbers: asking for a symbolic one would specialise a compiled graph."""
    product = task.contraction
    sizes = (task.batch, *product.image, *product.kernel, *product.response)
    return all(isinstance(size, int) for size in sizes)


def forget() -> None:
    """Drop remembered choices, after a setting or a fact about machines has changed."""
    _listed.cache_clear()
    benchmark.forget()
    for reaction in _when_forgotten:
        reaction()


def when_forgotten(reaction: Callable[[], None]) -> None:
    """Register a function to be called when remembered choices are dropped."""
    _when_forgotten.append(reaction)


@contextmanager
def force(*names: str) -> Iterator[None]:
    """Use the first of these algorithms that applies; raise a ValueError if none does. For tests and debugging."""
    known = [algorithm.name for algorithm in ALGORITHMS]
    for name in names:
        if name not in known:
            raise ValueError(f"no algorithm is called {name!r}; there are {', '.join(known)}")
    before = _settings
    set_settings(replace(before, forced=names))
    try:
        yield
    finally:
        set_settings(before)
