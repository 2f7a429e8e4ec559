"""Timing algorithms: once for each shape, kept on disk by processor, number of threads and version."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

import torch

from ..kernels import measurements
from .algorithms import Algorithm, Task

Candidate = TypeVar("Candidate", bound=Hashable)

log = logging.getLogger("convmesh.batching")

# What is fastest, and how it was found, by what the task is. For this process it stays as it is.
_fastest: dict[tuple[int, str], str] = {}


def fastest(task: Task, usable: Sequence[Algorithm], operands: Sequence[Any]) -> str:
    """Return the fastest algorithm's name, a space, and the times; from disk if they were measured before."""
    names = ",".join(each.name for each in usable)
    what = f"{task.contraction} {task.batch} {task.mapped} {task.lies_folded} {task.dtype}"
    key, threads = f"{what} by {_device(task.device)} with {names}", task.threads
    if (threads, key) not in _fastest:
        kept = measurements.read("fastest", threads).get(key)
        if isinstance(kept, str) and kept.partition(" ")[0] in names.split(","):
            _fastest[threads, key] = kept
        else:
            seconds = interleaved({each: partial(each.run, task, *operands) for each in usable}, task.device)
            best = min(seconds, key=lambda each: seconds[each])
            listed = ", ".join(f"{each.name} {1e3 * seconds[each]:.2f} ms" for each in usable)
            _fastest[threads, key] = f"{best.name} measured: {listed}"
            measurements.add("fastest", threads, {key: _fastest[threads, key]})
    return _fastest[threads, key]


def _device(kind: str) -> str:
    """Return the model of an accelerator, else the device type: the file is one of this processor already."""
    name = getattr(torch.get_device_module(kind), "get_device_name", None) if kind != "cpu" else None
    return kind if name is None else str(name())


def forget() -> None:
    """Drop what this process has measured; the file stays."""
    _fastest.clear()


def interleaved(
    candidates: Mapping[Candidate, Callable[[], object]], device: str, budget: float = 0.1
) -> dict[Candidate, float]:
    """Return the minimum time of each candidate: disturbances only add time. Candidates take turns.

    Candidates that are far slower after two rounds are not timed again.
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
