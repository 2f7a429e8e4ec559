"""What this rank's device does by itself: arithmetic by dtype, and memory."""

from __future__ import annotations

import os
from functools import partial

import torch

from .timing import Stopwatch

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
LONG_ENOUGH = 0.01  # seconds


def flops(watch: Stopwatch) -> dict[str, float]:
    """Return operations per second by dtype, of a matrix product that takes long enough to measure."""
    found = {}
    for dtype in DTYPES:
        side, seconds = 128, 0.0
        while seconds < LONG_ENOUGH and side < 8192:
            side *= 2
            matrix = torch.ones(side, side, dtype=dtype, device=watch.device)
            seconds = watch.seconds(partial(torch.mm, matrix, matrix))
        found[str(dtype).removeprefix("torch.")] = 2 * side**3 / seconds
    return found


def memory_bandwidth(watch: Stopwatch, elements: int) -> float:
    """Return bytes per second, read plus written, of a copy."""
    source = torch.ones(elements, device=watch.device)
    target = torch.empty_like(source)
    return 2 * source.nbytes / watch.seconds(lambda: target.copy_(source))


def memory(device: torch.device, local_ranks: int) -> int:
    """Return the device's memory in bytes; for a CPU, this rank's share of the machine's."""
    if device.type == "cpu":
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // local_ranks
    return int(torch.accelerator.get_memory_info(device)[1])
