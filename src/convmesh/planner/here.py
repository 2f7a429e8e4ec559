"""This machine as a device: what it reaches, measured in a few seconds."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from functools import cache
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F

from .devices import Device, Link
from .timing import roofline
from .trace import Compute

LARGEST = 5 * 10**10  # floating point operations of an operator that is run to be timed
_ROUNDS = 3


@cache
def this_machine() -> Device:
    """One thread of a CPU, as a rank has it under torchrun. Links are copies of memory between processes."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        flops = {name: _convolution(getattr(torch, name)) for name in ("float32", "float64", "bfloat16")}
        source = torch.ones(2**24)
        target = torch.empty_like(source)
        bandwidth = 2 * source.nbytes / _timed(lambda: target.copy_(source))
        small = torch.ones(1)
        overhead = _timed(lambda: [small.add(1) for _ in range(1000)]) / 1000
    finally:
        torch.set_num_threads(threads)
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    between = Link(2e-4, bandwidth / 4)  # written into shared memory and read from there
    return Device("this machine, a thread of its CPU", memory, flops, bandwidth, between, between, os.cpu_count() or 1,
                  overhead, 1.0, 1.0, "measured now")  # fmt: skip


def measured(device: Device) -> Callable[[Compute], float]:
    """Seconds of operators here: those with floating point operations are run once with numbers, if they are not too
    large, and others by the roofline."""
    known: dict[tuple[object, ...], float] = {}

    def seconds(operator: Compute) -> float:
        if not operator.signature or operator.flops > LARGEST:
            return roofline(operator, device)
        if operator.signature not in known:
            known[operator.signature] = _run(operator.signature)
        return known[operator.signature]

    return seconds


def _run(signature: tuple[Any, ...]) -> float:
    operator, arguments = signature
    made = [_made(argument) for argument in arguments]
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return _timed(lambda: operator(*made))
    finally:
        torch.set_num_threads(threads)


def _made(described: Any) -> Any:
    if isinstance(described, tuple) and len(described) == 3 and isinstance(described[2], torch.dtype):
        shape, stride, dtype = described
        return torch.empty_strided(shape, stride, dtype=dtype, device="cpu").fill_(0.5)
    return [_made(one) for one in described] if isinstance(described, tuple) else described


def _convolution(dtype: torch.dtype) -> float:
    x, weight = torch.ones(1, 32, 96, 96, dtype=dtype), torch.ones(32, 32, 3, 3, dtype=dtype)
    return 2 * 32 * 32 * 9 * 94 * 94 / _timed(lambda: F.conv2d(x, weight))


def _timed(work: Callable[[], object]) -> float:
    work()
    seconds = []
    for _ in range(_ROUNDS):
        start = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - start)
    return median(seconds)
