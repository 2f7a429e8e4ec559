"""Which algorithm a task gets, and why."""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any

from . import cost
from ._functorch import Nature
from .algorithms import Algorithm, Fold, FoldGroups, Loop, Task
from .direct import Direct, Winograd
from .grouped import Exchange, Repeat
from .machines import OWN, Ranks
from .memory import returns_large_blocks
from .patches import Taps, Unfold
from .pointwise import Pointwise
from .race import interleaved

# In the order of preference where estimates are equal: the folds, which apply to anything, come first.
ALGORITHMS: tuple[Algorithm, ...] = (
    Fold("N"),
    Fold("O"),
    Fold("C"),
    FoldGroups(),
    Repeat(),
    Exchange(),
    Pointwise(),
    Unfold(),
    Taps(),
    Direct(),
    Winograd(),
    Loop(),
)

# Estimates are off by ten or twenty per cent. Leave the fold, which torch itself would take, only for a clear gain, and
# on a device for which nothing was measured only for a very clear one.
CLEAR_GAIN, GAIN_UNMEASURED = 0.85, 0.5
# Prices are of operands that have their samples in front. Where they lie as a fold left them, others have to copy them,
# but for those that read operands as they lie. These have little beside the arithmetic, and are estimated well.
GAIN_OVER_FOLDED, GAIN_AS_LAID = 0.8, 1.0
# Nor for less seconds than a few calls from Python take.
LEAST_GAIN = 2e-4

# So many choices are remembered.
LONGEST = 4096

log = logging.getLogger("convmesh.batching")
_forced: tuple[str, ...] = ()
_trying = False
_found: dict[Hashable, Decision | None] = {}
_listeners: list[list[Decision]] = []
_when_forgotten: list[Callable[[], None]] = []


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
    """The algorithm for a task; said to the debug log and to `explain`. `operands` are there to be tried with.

    `ranks` are those that have parts of the same call.
    """
    decision = _forced_decision(task) if _forced else _tried(task, operands, ranks) if _trying else None
    if decision is None:
        static = task.nature is Nature.PLAIN or _is_static(task)
        decision = _decide(task) if static else _fold(task, "sizes are symbolic")
    if is_watched():
        log.debug("%s", decision)
        for listener in _listeners:
            listener.append(decision)
    return decision


@lru_cache(maxsize=LONGEST)
def _decide(task: Task) -> Decision:
    decision = _estimated(task)
    as_torch = task.nature is Nature.PLAIN and decision.algorithm.is_torchs_own
    return replace(decision, as_torch=as_torch)


def _estimated(task: Task) -> Decision:
    usable = [algorithm for algorithm in ALGORITHMS if algorithm.applies(task)]
    if len(usable) == 1 or task.nature is Nature.OPAQUE:
        return Decision(task, usable[0], "the only one for such operands")
    if task.is_empty or task.batch == 1:
        return Decision(task, usable[0], "nothing to gain")
    table = task.machine.prices()
    estimates = {algorithm: table.seconds(algorithm, task) for algorithm in usable}
    known = {algorithm: seconds for algorithm, seconds in estimates.items() if seconds is not None}
    if usable[0] not in known:
        return Decision(task, usable[0], "no prices for such a task; calibrate() measures them")
    measured = table.measured_for(task)
    best = _best(task, usable[0], known, measured.startswith(f"{task.device}/"))
    listed = ", ".join(f"{algorithm.name} {1e3 * seconds:.2f} ms" for algorithm, seconds in known.items())
    scaled = "" if measured == cost.circumstances(task) else f", scaled from {measured}"
    return Decision(task, best, f"{table.source}{scaled}: {listed}")


def _best(task: Task, fold: Algorithm, known: Mapping[Algorithm, float], measured: bool) -> Algorithm:
    """The fold, unless another one promises a gain that is clear."""
    touch = cost.FIRST_TOUCH * cost.first_touch(fold, task)
    seconds = {each: known[each] + (0.0 if each.keeps_memory else touch) for each in known}
    if not any(each.reads_as_laid for each in known):  # which would most likely be taken for the other product
        seconds[fold] -= cost.shared_copy(fold, task)
    others = [each for each in known if seconds[each] <= _clear_gain(each, task, measured) * seconds[fold]]
    best = min(others, key=lambda each: seconds[each], default=fold)
    return best if seconds[fold] - seconds[best] >= LEAST_GAIN else fold


def _clear_gain(algorithm: Algorithm, task: Task, measured: bool) -> float:
    """Of the fold's time, how much another algorithm may take at most to be preferred."""
    if not measured:
        return GAIN_UNMEASURED
    if algorithm.reads_as_laid:
        return GAIN_AS_LAID
    return GAIN_OVER_FOLDED if task.lies_folded else CLEAR_GAIN


def _tried(task: Task, operands: Sequence[Any], ranks: Ranks | None) -> Decision | None:
    """By the clock, at the first call with such a task, if `try_all` asks for it and nobody watches.

    Ranks with parts of one call take what is fastest for the first of them. Of a plain tensor other ranks know
    nothing: only a process that is alone may go by its clock.
    """
    if not operands or (ranks is None and task.machine is not OWN):
        return None
    key = (task, ranks)
    if key not in _found:
        _found[key] = _fastest(task, operands) if ranks is None else _as_the_first(task, operands, ranks)
    return _found[key]


def _fastest(task: Task, operands: Sequence[Any]) -> Decision | None:
    if task.nature is not Nature.PLAIN or task.is_empty:
        return None
    usable = {each: partial(each.run, task, *operands) for each in ALGORITHMS if each.applies(task)}
    seconds = interleaved(usable, task.device)
    listed = ", ".join(f"{each.name} {1e3 * seconds[each]:.2f} ms" for each in usable)
    return Decision(task, min(seconds, key=lambda each: seconds[each]), f"tried: {listed}")


def _as_the_first(task: Task, operands: Sequence[Any], ranks: Ranks) -> Decision | None:
    """None where the first rank could not tell, or where its part differs so much that its algorithm is none here."""

    def say() -> str:
        best = _fastest(task, operands)
        return "" if best is None else f"{best.algorithm.name} {best.reason}"

    name, _, reason = (ranks.by_the_first(say) or "").partition(" ")
    return next((Decision(task, each, reason) for each in ALGORITHMS if each.name == name and each.applies(task)), None)


def attend(ranks: Ranks) -> None:
    """On a rank that has no sample to choose for: be there where `choose` asks the first rank."""
    if _trying and not _forced:
        ranks.by_the_first(str)


def is_watched() -> bool:
    """Whether choices are to be made in another way than by estimates, or told to somebody."""
    return bool(_forced) or _trying or bool(_listeners) or log.isEnabledFor(logging.DEBUG)


def tries_all() -> bool:
    return _trying


def try_all(wanted: bool) -> None:
    """Whether a task's first call tries all algorithms, and takes the fastest of them from then on."""
    global _trying
    _trying = wanted


def _forced_decision(task: Task) -> Decision:
    usable = {algorithm.name: algorithm for algorithm in ALGORITHMS if algorithm.applies(task)}
    for name in _forced:
        if name in usable:
            return Decision(task, usable[name], "forced")
    raise ValueError(
        f"{' or '.join(_forced)} is forced, but does not apply to the {_described(task)}\n"
        f"  remedy: force another one ({', '.join(usable)}), or name some of these, too"
    )


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
    _found.clear()
    cost.calibration.cache_clear()
    cost.price_table.cache_clear()
    returns_large_blocks.cache_clear()
    for reaction in _when_forgotten:
        reaction()


def when_forgotten(reaction: Callable[[], None]) -> None:
    """Have something done whenever remembered choices are dropped."""
    _when_forgotten.append(reaction)


@contextmanager
def force(*names: str) -> Iterator[None]:
    """Take the first of these algorithms that applies; a ValueError where none does. For tests, and for doubts."""
    global _forced
    known = [algorithm.name for algorithm in ALGORITHMS]
    for name in names:
        if name not in known:
            raise ValueError(f"no algorithm is called {name!r}; there are {', '.join(known)}")
    previous, _forced = _forced, names
    try:
        yield
    finally:
        _forced = previous


def explain(function: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Decision]:
    """Run a function and report how its vmapped convolutions were computed, and why.

    Args:
        function: The function to run.
        *args: Its arguments.
        **kwargs: Its keyword arguments.

    Returns:
        One decision for each vmapped convolution. `str(decision)` is a line of text: the product, its sizes, the
        algorithm, and the estimated or measured times.

    Raises:
        Exception: Whatever `function` raises.

    Examples:
        >>> images, kernels = torch.randn(8, 4, 3, 16, 16), torch.randn(8, 6, 3, 3, 3)  # 8 networks, 8 inputs
        >>> with convmesh.enable():
        ...     decisions = convmesh.explain(torch.func.vmap(F.conv2d), images, kernels)
        >>> str(decisions[0]).partition(",")[0]
        'response of [B...] x [B...]'
    """
    decisions: list[Decision] = []
    _listeners.append(decisions)
    try:
        function(*args, **kwargs)
    finally:
        # By identity: two equal lists of decisions may listen at once.
        _listeners[:] = [listener for listener in _listeners if listener is not decisions]
    return decisions
