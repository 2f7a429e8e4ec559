"""Timing candidates against each other on a machine that may have other work."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Mapping
from typing import TypeVar

import torch

Candidate = TypeVar("Candidate", bound=Hashable)


def interleaved(
    candidates: Mapping[Candidate, Callable[[], object]], device: str, budget: float = 0.1
) -> dict[Candidate, float]:
    """The least time of each candidate: what disturbs a machine only ever adds. They take turns.

    Who is far behind after two rounds is not timed again: how far does not matter.
    """
    times: dict[Candidate, list[float]] = {each: [] for each in candidates}
    racing, rounds, done = set(candidates), 2, 0
    while done < rounds:
        for each in racing:
            times[each].append(_seconds(candidates[each], device))
        done += 1
        if done == 2:
            least = {each: min(measured) for each, measured in times.items()}
            racing = {each for each in racing if least[each] < 3 * min(least.values())}
            rounds = 2 + max(3, min(15, int(budget / sum(least[each] for each in racing))))
    return {each: min(measured) for each, measured in times.items()}


def _seconds(run: Callable[[], object], device: str) -> float:
    start = time.perf_counter()
    run()
    if device != "cpu":
        torch.accelerator.synchronize()
    return time.perf_counter() - start
