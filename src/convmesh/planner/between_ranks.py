"""Latency and bandwidth between ranks on CPUs of this machine, measured between processes.

These share two cores, as many on each as a mesh has ranks for a core. So waiting for a rank that has no core yet, and
copying for others, is in the figures.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from functools import cache
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist

from .. import _torch, api
from ..comm import sum_over
from .devices import Link
from .problem import PlanError

SMALL, LARGE = 2**8, 2**20  # float32: about what a norm sends of a channel each, and a halo or a bucket of gradients
ROUNDS, REPEAT = 7, 4
SECONDS = 120  # after which something is wrong
_MOST = 4  # ranks on a core; more take as much longer as they are more
_ONLY = hasattr(os, "sched_setaffinity")  # a process can be told to use no cores but some


def cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if _ONLY else os.cpu_count() or 1


@cache
def links(on_a_core: int) -> tuple[Link, Link]:
    """Measure the links of halos, and of reductions and gathers, where so many ranks are on a core."""
    if on_a_core > _MOST:
        halos, sums = links(_MOST)
        return halos.slower(on_a_core / _MOST), sums.slower(on_a_core / _MOST)
    ranks = max(2, on_a_core * min(2, cores()))
    with tempfile.TemporaryDirectory(prefix="convmesh-plan-") as folder:
        command = [sys.executable, "-c", f"from {__name__} import measure; measure()", str(ranks), f"{folder}/store"]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OMP_NUM_THREADS": "1"}
        processes = [
            subprocess.Popen([*command, str(rank)], env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
            for rank in range(ranks)
        ]
        try:
            told = [process.communicate(timeout=SECONDS) for process in processes]
        except subprocess.TimeoutExpired:
            raise _unknown(f"no answer within {SECONDS} s") from None
        finally:
            for process in processes:
                process.kill()
                process.wait()
    if any(process.returncode for process in processes):
        lines = [line for _, error in told for line in error.decode().splitlines()[-1:]]
        raise _unknown(lines[0] if lines else "they have ended")
    halos, sums = (Link(*figures) for figures in json.loads(told[0][0].splitlines()[-1]))
    return halos, sums


def _unknown(why: str) -> PlanError:
    return PlanError(
        f"messages between processes of this machine cannot be measured ({why}): give a device file instead"
    )


def measure() -> None:
    """Run one of the processes: `python -c ... RANKS STORE RANK`. The first one prints (latency, bandwidth) of halos
    and of sums."""
    ranks, store, rank = int(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
    if _ONLY:
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:2])
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=ranks,
        timeout=timedelta(seconds=SECONDS),
    )
    api.enable()
    # As `timing.sending` has it: halos go to neighbours on both sides, sums in a ring.
    halos = _link(_halo, 1, min(2, ranks - 1))
    sums = _link(_sum, (ranks - 1).bit_length(), 2 * (ranks - 1) / ranks)
    if rank == 0:
        print(json.dumps([halos, sums]))
    dist.barrier()
    dist.destroy_process_group()


def _link(message: Callable[[int], Callable[[], object]], hops: int, times: float) -> tuple[float, float]:
    """Return (seconds until the first byte is there, bytes a second) of a message whose bytes are sent `times`
    times."""
    small, large = (_slowest(message(count)) for count in (SMALL, LARGE))
    return small / hops, times * 4 * (LARGE - SMALL) / max(large - small, 1e-9)


def _halo(count: int) -> Callable[[], object]:
    """Return a function that exchanges halos with the neighbours in a row of ranks."""
    group = dist.group.WORLD
    assert group is not None
    here = dist.get_rank()
    counts = [count if abs(rank - here) == 1 else 0 for rank in range(dist.get_world_size())]
    buffer = torch.ones(sum(counts))
    return lambda: _torch.wait(_torch.all_to_all(buffer, counts, counts, group))


def _sum(count: int) -> Callable[[], object]:
    """Return a function that sums as the library does: few numbers, such as a norm's, through shared memory, many by
    gloo."""
    group = dist.group.WORLD
    assert group is not None
    data = torch.zeros(count)
    return lambda: sum_over(data, [group])


def _slowest(message: Callable[[], object]) -> float:
    """Return the seconds of a message, of the rank that takes longest."""
    rounds = []
    for number in range(ROUNDS + 2):
        dist.barrier()
        start = time.perf_counter()
        for _ in range(REPEAT):
            message()
        if number > 1:
            rounds.append((time.perf_counter() - start) / REPEAT)
    slowest = torch.tensor(median(rounds), dtype=torch.float64)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return float(slowest)
