"""Measuring on a machine that others use too: interleaved candidates and medians."""

from __future__ import annotations

import ctypes
import statistics
import time
from collections.abc import Callable, Mapping


def interleave(candidates: Mapping[str, Callable[[], float]], rounds: int) -> dict[str, float]:
    """The median seconds of every candidate, each measured once a round: what disturbs a round disturbs them all.

    Every other round goes backwards, so that none always comes after the same one, and finds what that leaves behind:
    cold caches, threads that look for more work.
    """
    seconds: dict[str, list[float]] = {name: [] for name in candidates}
    for number in range(rounds):
        for name in candidates if number % 2 == 0 else reversed(list(candidates)):
            seconds[name].append(candidates[name]())
    return {name: statistics.median(values) for name, values in seconds.items()}


def timed(work: Callable[[], object], repeat: int = 1) -> float:
    start = time.perf_counter()
    for _ in range(repeat):
        work()
    return (time.perf_counter() - start) / repeat


def keep_memory() -> None:
    """Let this process keep the memory that it has touched, as allocators for GPUs do, where its C library can.

    glibc gives large blocks back and gets them anew, page by page, which may take ten times as long as an operator
    does. Whether it does so for a candidate depends on a few bytes more or less, and would be all that is measured.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mmap_max, trim_threshold = -4, -1
        mallopt(mmap_max, 0)
        mallopt(trim_threshold, -1)  # never
