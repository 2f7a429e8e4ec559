"""Measuring on a machine that others use too: interleaved candidates and medians."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping


def interleave(candidates: Mapping[str, Callable[[], float]], rounds: int) -> dict[str, float]:
    """The median seconds of every candidate, each measured once a round: what disturbs a round disturbs them all."""
    seconds: dict[str, list[float]] = {name: [] for name in candidates}
    for _ in range(rounds):
        for name, measure in candidates.items():
            seconds[name].append(measure())
    return {name: statistics.median(values) for name, values in seconds.items()}


def timed(work: Callable[[], object], repeat: int = 1) -> float:
    start = time.perf_counter()
    for _ in range(repeat):
        work()
    return (time.perf_counter() - start) / repeat
