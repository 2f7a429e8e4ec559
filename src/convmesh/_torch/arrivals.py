"""Waiting for messages on CPUs: by polling at first."""

from __future__ import annotations

import os
from time import perf_counter

import torch
import torch.distributed as dist

from .groups import group_called

# Seconds for which a thread polls for a message before it sleeps: waking up takes longer than most messages do
# (measured with gloo on one machine: 1.2 ms per message asleep and 0.5 awake, 2.9 and 1.2 with two ranks per core).
AWAKE_SECONDS = 0.01
# By storage address of the result, until it is awaited. It may never be, so only the last of them are kept.
_arrivals: dict[int, dist.Work] = {}
ARRIVALS = 64


def memory_of(tensor: torch.Tensor) -> int:
    """Return an id of a tensor's storage, which differs between storages even if they are empty."""
    return int(tensor.untyped_storage()._cdata)


def all_to_all_on_cpus(
    buffer: torch.Tensor, receive_counts: list[int], send_counts: list[int], group: dist.ProcessGroup | str
) -> torch.Tensor:
    """Do what torch's operator does, and keep the work handle, so that a waiting thread can ask whether it is done."""
    result = buffer.new_empty((sum(receive_counts), *buffer.shape[1:]))
    work = group_called(group).alltoall_base(result, buffer.contiguous(), receive_counts, send_counts)
    torch._C._distributed_c10d._register_work(result, work)
    _arrivals[memory_of(result)] = work
    if len(_arrivals) > ARRIVALS:
        del _arrivals[next(iter(_arrivals))]
    return result


def look_for(tensor: torch.Tensor) -> None:
    """Poll for a while until the result of a collective is there, yielding the core to other threads."""
    work = _arrivals.pop(memory_of(tensor), None)
    if work is not None:
        stay_awake(work)


def stay_awake(work: dist.Work) -> None:
    if not hasattr(os, "sched_yield"):
        return
    until = perf_counter() + AWAKE_SECONDS
    while not work.is_completed() and perf_counter() < until:
        os.sched_yield()
