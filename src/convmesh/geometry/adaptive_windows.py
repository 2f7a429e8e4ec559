"""Windows of adaptive pooling in bundles of equal ones at equal distances, each of which is a view of the sources."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import gcd

from .dependence import Runs
from .interval import Interval


@dataclass(frozen=True)
class Bundle:
    """Windows number `i < count`: target `target + target_step * i` takes the sources from `start + step * i` on.

    They are `length <= step` sources each, out of the `whole` that the window has on all ranks. Targets and sources
    count from the start of the rank's own. `count * step` sources from `start` on are there.
    """

    target: int
    target_step: int
    start: int
    step: int
    count: int
    length: int
    whole: int


def adaptive_bundles(source_size: int, target_size: int, sources: Interval, targets: Interval) -> tuple[Bundle, ...]:
    """The windows of `targets`, of which only what lies in `sources` is there."""
    runs = Runs.adaptive(source_size, target_size)
    # Windows so many targets apart are alike: `period` of them take up `step` sources.
    period = target_size // gcd(source_size, target_size)
    step = source_size // gcd(source_size, target_size)
    found: dict[tuple[int, int, int], list[int]] = {}
    for target in range(targets.start, targets.stop):
        window = runs.reads(Interval(target, target + 1)) & sources
        key = (target % period, window.start - target // period * step, len(window))
        if window:
            found.setdefault(key, []).append(target)
    bundles = (_bundle(alike, key[2], period, step, runs, sources, targets) for key, alike in found.items())
    return tuple(bundle for pair in bundles for bundle in pair)


def _bundle(
    alike: list[int], length: int, period: int, step: int, runs: Runs, sources: Interval, targets: Interval
) -> Iterable[Bundle]:
    """One, and one more for a last window that has no room for a whole step behind it."""

    def make(first: int, count: int, step: int) -> Bundle:
        start = max(runs.starts[first], sources.start) - sources.start
        whole = runs.stops[first] - runs.starts[first]
        return Bundle(first - targets.start, period, start, step, count, length, whole)

    last = alike[-1]
    room = sources.stop - max(runs.starts[last], sources.start) >= step
    if room:
        yield make(alike[0], len(alike), step)
        return
    if len(alike) > 1:
        yield make(alike[0], len(alike) - 1, step)
    yield make(last, 1, length)
