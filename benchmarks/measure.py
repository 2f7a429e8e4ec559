"""Measuring on a machine that others use too: interleaved candidates, medians, and turns that nobody disturbed."""

from __future__ import annotations

import ctypes
import statistics
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from convmesh.kernels.memory import shelf


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


def timed(work: Callable[[], object], repeat: int = 1, clock: Callable[[], float] = time.perf_counter) -> float:
    start = clock()
    for _ in range(repeat):
        work()
    return (clock() - start) / repeat


class Turn(NamedTuple):
    seconds: float  # of a call
    lost: float  # seconds for which a thread of this process was ready and had no core, in a second


# Threads of an OpenMP team look for more work for 3 to 8 ms before they sleep, and so do those of a process whose turn
# has just ended.
REST = 0.02
LOST = 0.01


def undisturbed(work: Callable[[], object], at_least: float = 0.05, tries: int = 8) -> Turn:
    """Calls one after the other, for so many seconds; again if others had the cores, and then the best of some turns.

    One thread without a core holds up all that wait for it: work of 2 ms has been seen to take 30 where another process
    wanted a third of the machine, for as long as it did so.
    """
    time.sleep(REST)
    work()
    repeat = max(1, round(at_least / timed(work)))
    turns: list[Turn] = []
    for _ in range(tries):
        before = without_a_core()
        seconds = timed(work, repeat)
        turns.append(Turn(seconds, (without_a_core() - before) / (seconds * repeat)))
        if turns[-1].lost < LOST:
            break
    return min(turns, key=lambda turn: turn.lost)


def without_a_core() -> float:
    """Seconds for which threads of this process were ready to run and did not, where Linux counts them."""
    waited = 0
    for thread in Path("/proc/self/task").glob("*"):
        with suppress(OSError):  # it has ended
            waited += int((thread / "schedstat").read_text().split()[1])
    return waited / 1e9


def give_memory_back() -> None:
    """What this process keeps for its next tensors goes back to the system, where its C library can do that."""
    shelf.clear()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def keep_memory() -> None:
    """Let this process keep the memory that it has touched, as allocators for GPUs do, where its C library can.

    glibc gives large blocks back and gets them anew, page by page, which may take ten times as long as an operator
    does. Whether it does so for a candidate depends on a few bytes more or less, and would be all that is measured.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mmap_max, trim_threshold, arena_max = -4, -1, -8
        mallopt(mmap_max, 0)
        mallopt(trim_threshold, -1)  # never
        mallopt(arena_max, 1)  # arenas of threads other than the first give their memory back all the same
