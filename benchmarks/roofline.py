"""How fast a perfect library could be: what arithmetic and memory of this machine permit, both measured here.

A convolution does the multiplications and additions of its definition, but for those of padding, at the greatest speed
that a large matrix product or a large convolution reaches; and it reads its operands and writes its result, once each,
at the speed at which as many bytes are copied in memory that was used before. The longer of the two counts. What is
beside convolutions (the loss) takes what it takes. Ways that need fewer multiplications are left out.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import lru_cache

import torch
import torch.nn.functional as F

from benchmarks.measure import timed
from convmesh.batching.algorithms import Task
from convmesh.batching.contraction import FACTORS


def least_of(tasks: Sequence[Task], beside: Callable[[], object] | None, threads: int, dtype: torch.dtype) -> float:
    """Milliseconds."""
    torch.set_num_threads(threads)
    speed = arithmetic_speed(threads, dtype)
    alone = 0.0 if beside is None else quickest(beside)
    return alone + sum(max(arithmetic_of(task) / speed, copying(bytes_of(task), threads)) for task in tasks)


def arithmetic_of(task: Task) -> float:
    """Multiplications and additions; what padding is multiplied by is nothing that has to be done."""
    product, geometry = task.contraction, task.contraction.geometry
    sizes = zip(product.image[2:], product.kernel[2:], product.response[2:], strict=True)
    steps = zip(geometry.stride, geometry.padding, geometry.dilation, strict=True)
    share = 1.0
    for (image, kernel, response), (stride, padding, dilation) in zip(sizes, steps, strict=True):
        read = [o * stride - padding + dilation * j for o in range(response) for j in range(kernel)]
        share *= sum(0 <= place < image for place in read) / len(read)
    return 2 * share * task.batch * product.multiplications


def bytes_of(task: Task) -> int:
    """Of the operands and the result."""
    product = task.contraction
    operands = zip(FACTORS[product.wanted], task.mapped, strict=True)
    numbers = [math.prod(product.shape(role)) * (task.batch if mapped else 1) for role, mapped in operands]
    return sum(numbers) * task.itemsize + task.result_bytes


@lru_cache
def arithmetic_speed(threads: int, dtype: torch.dtype) -> float:
    """Multiplications and additions in a millisecond."""
    torch.set_num_threads(threads)
    size, channels, images, side = 1024, 64, 16, 32
    a, b = torch.randn(2, size, size, dtype=dtype)
    x, w = torch.randn(images, channels, side, side, dtype=dtype), torch.randn(channels, channels, 3, 3, dtype=dtype)
    product = 2 * size**3 / quickest(lambda: a @ b)
    convolution = 2 * F.conv2d(x, w).numel() * w[0].numel() / quickest(lambda: F.conv2d(x, w))
    return max(product, convolution)


def copying(size: int, threads: int) -> float:
    """Milliseconds in which so many bytes are read or written: within caches it depends on how many."""
    rounded = 2 ** max(12, round(math.log2(max(1, size))))
    return size / rounded * _copying(rounded, threads)


@lru_cache
def _copying(size: int, threads: int) -> float:
    torch.set_num_threads(threads)
    source, target = torch.zeros(2, size // 8)  # a half is read and a half is written, 4 bytes a number
    return quickest(lambda: target.copy_(source))


def quickest(run: Callable[[], object]) -> float:
    """Milliseconds."""
    return 1e3 * min(timed(run) for _ in range(20))
