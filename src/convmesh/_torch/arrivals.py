"""Waiting for messages on CPUs: awake at first."""

from __future__ import annotations

import os
from time import perf_counter

import torch
import torch.distributed as dist

from .groups import group_called

# How long a thread looks for a message before it lies down for it: to be woken takes longer than most messages do
# (measured with gloo on one machine: 1.2 ms a message asleep and 0.5 awake, 2.9 and 1.2 with two ranks a core).
AWAKE_SECONDS = 0.01
# By the memory of the result, until somebody waits for it. Nobody may, and so only the last of them are kept.
_arrivals: dict[int, dist.Work] = {}
ARRIVALS = 64


def memory_of(tensor: torch.Tensor) -> int:
    """Tells tensors apart that look at different memory, also where there is none of it."""
    return int(tensor.untyped_storage()._cdata)


def all_to_all_on_cpus(
    buffer: torch.Tensor, receive_counts: list[int], send_counts: list[int], group: dist.ProcessGroup | str
) -> torch.Tensor:
    """What torch's operator does, except that whoever waits for the result can ask whether it is there."""
    result = buffer.new_empty((sum(receive_counts), *buffer.shape[1:]))
    work = group_called(group).alltoall_base(result, buffer.contiguous(), receive_counts, send_counts)
    torch._C._distributed_c10d._register_work(result, work)
    _arrivals[memory_of(result)] = work
    if len(_arrivals) > ARRIVALS:
        del _arrivals[next(iter(_arrivals))]
    return result


def look_for(tensor: torch.Tensor) -> None:
    """Stay awake for a while until the result of a collective is there, and let others compute meanwhile."""
    work = _arrivals.pop(memory_of(tensor), None)
    if work is not None:
        stay_awake(work)


def stay_awake(work: dist.Work) -> None:
    if not hasattr(os, "sched_yield"):
        return
    until = perf_counter() + AWAKE_SECONDS
    while not work.is_completed() and perf_counter() < until:
        os.sched_yield()
