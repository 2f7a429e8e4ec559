"""This machine as a device: what it reaches, and how long a rank's own work of a step takes here."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from statistics import median
from threading import Thread

import torch
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh

from .. import _torch
from ..training.borrowed import giving_back
from .between_ranks import cores, links
from .devices import Device
from .dry_run import in_thread
from .problem import Mesh, Problem, ranks_of
from .trace import Compute, Trace

SOURCE = "measured now"
LARGEST = 10**13  # floating point operations of a step that is run: minutes of a core
_ROUNDS = 3


@cache
def this_machine() -> Device:
    """Measure one thread of a CPU, as a rank has it under torchrun, while all cores are busy."""
    flops = {name: _one_thread(partial(_convolution, getattr(torch, name))) for name in _DTYPES}
    bandwidth = min(_at_once(_copies, cores()))
    small = torch.ones(1)
    overhead = _one_thread(lambda: _timed(lambda: [small.add(1) for _ in range(1000)]) / 1000)
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    halos, sums = links(1)
    return Device(
        "this machine, a thread of its CPU", memory, flops, bandwidth, node=halos, network=halos, node_ranks=1024,
        overhead=overhead, compute_share=1.0, memory_share=1.0, source=SOURCE, cores=cores(), sums=sums,
    )  # fmt: skip


def shared(device: Device, ranks: int) -> Device:
    """Return this machine as so many ranks have it: with messages between ranks that share cores."""
    on_a_core = -(-ranks // device.cores)
    if on_a_core == 1:
        return device
    halos, sums = links(on_a_core)
    return replace(device, node=halos, network=halos, sums=sums)


def step_seconds(problem: Problem, mesh: Mesh, rank: int, trace: Trace, memory: int) -> float | None:
    """Time a rank's own work of a step, run here with numbers and without other ranks, from which it receives zeros.

    None where the step, of which `trace` is a record, is too large for that.
    """
    if sum(event.flops for event in trace.step if isinstance(event, Compute)) > LARGEST:
        return None
    if _most_held(trace) > memory // 3:
        return None
    return in_thread(lambda: _one_thread(lambda: _step_seconds(problem, mesh, rank)))


def _most_held(trace: Trace) -> int:
    """Return roughly what a step needs at most: all that is made in it at once."""
    return sum(block.size for block in trace.blocks if block.died is None or block.died >= trace.begins)


def _step_seconds(problem: Problem, mesh: Mesh, rank: int) -> float:
    with _torch.rank_of_threads(rank, ranks_of(mesh), _torch.SilentStore()), giving_back():
        on = init_device_mesh("cpu", tuple(mesh.values()), mesh_dim_names=tuple(mesh))
        step, inputs = problem.step(on), problem.tensors(on)
        step(**inputs)
        return _timed(lambda: step(**inputs), time.thread_time)  # which other programs do not change


def _one_thread(work: Callable[[], float]) -> float:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return work()
    finally:
        torch.set_num_threads(threads)


def _at_once(work: Callable[[], float], count: int) -> list[float]:
    """Return what each of several threads measures while the others do the same."""
    found: list[float] = []
    threads = [Thread(target=lambda: found.append(_one_thread(work))) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


_DTYPES = ("float32", "float64", "bfloat16")


def _copies() -> float:
    """Return the bytes a second that are read and written."""
    source = torch.ones(2**24)
    target = torch.empty_like(source)
    return 2 * source.nbytes / _timed(lambda: target.copy_(source))


def _convolution(dtype: torch.dtype) -> float:
    x, weight = torch.ones(1, 32, 96, 96, dtype=dtype), torch.ones(32, 32, 3, 3, dtype=dtype)
    return 2 * 32 * 32 * 9 * 94 * 94 / _timed(lambda: F.conv2d(x, weight))


def _timed(work: Callable[[], object], clock: Callable[[], float] = time.perf_counter) -> float:
    work()
    seconds = []
    for _ in range(_ROUNDS):
        start = clock()
        work()
        seconds.append(clock() - start)
    return median(seconds)
