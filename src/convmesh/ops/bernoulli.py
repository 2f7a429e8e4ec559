"""Zeros and ones of one CPU, of which a rank makes its own only: the generator has to give the numbers for all of them.

Giving a number takes half as long as making a one or a zero of it as torch does. Numbers are drawn in blocks that stay
in the cache, so that nothing of the whole tensor's size is needed.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from itertools import product
from math import ceil, prod

import torch

from .. import _torch
from ..comm import Held
from ..geometry import Box, Interval
from ..sharding.layout import Layout

BITS = 53
BLOCK = 1 << 17


def drawn_in_blocks(
    layout: Layout, device: torch.device, into: torch.Tensor | None, p: float, generator: torch.Generator | None
) -> torch.Tensor | None:
    """This rank's part of what torch fills a tensor with by `bernoulli_(p)`: in new memory if there is no `into`.

    None, and nothing done, where all of the tensor has to be filled for it.
    """
    if device.type != "cpu" or not 0 <= p <= 1 or not layout.cuts or _torch.tracing() or not _one_by_one():
        return None
    # In the order of memory, which is the one that elements are drawn in.
    order = sorted(range(len(layout.shape)), key=lambda dim: -layout.stride[dim])
    if not _fills_memory([(layout.shape[dim], layout.stride[dim]) for dim in order]):
        return None
    own = tuple(layout.own(dim) for dim in order)
    result = into.permute(order) if into is not None else torch.empty([len(side) for side in own], dtype=layout.dtype)
    numbers, dims = torch.empty(BLOCK, dtype=torch.int64), tuple(range(len(order)))
    for block in _blocks(tuple(layout.shape[dim] for dim in order)):
        shape = [len(side) for side in block]
        drawn = numbers[: prod(shape)].random_(generator=generator)
        common = tuple(a & b for a, b in zip(block, own, strict=True))
        if all(common):
            ones = Held.own(_decide(drawn, p).view(shape), dims, block).read(common)
            Held.own(result, dims, own).read(common).copy_(ones)
    return result.permute([order.index(dim) for dim in range(len(order))])


def _fills_memory(sides: list[tuple[int, int]]) -> bool:
    """Whether dimensions, each with its stride, leave no gaps in memory and do not overlap."""
    return all(
        size == 1 or stride == prod(inner for inner, _ in sides[number + 1 :])
        for number, (size, stride) in enumerate(sides)
    )


def _decide(numbers: torch.Tensor, p: float) -> torch.Tensor:
    """In place: the last bits of a number are a fraction, and one that is less than `p` becomes a one."""
    return numbers.bitwise_and_(2**BITS - 1).lt_(ceil(p * 2**BITS))


@cache
def _one_by_one() -> bool:
    """Whether torch makes every element of 64 bits of the generator in this way. On some CPUs it asks a library."""
    p, elements = 0.3, 1000
    theirs, ours = torch.Generator(), torch.Generator()
    expected = torch.empty(elements).bernoulli_(p, generator=theirs)
    found = _decide(torch.empty(elements, dtype=torch.int64).random_(generator=ours), p)
    return torch.equal(expected, found.float()) and torch.equal(theirs.get_state(), ours.get_state())


def _blocks(shape: tuple[int, ...]) -> Iterator[Box]:
    """A tensor in pieces that follow each other in memory, of `BLOCK` elements at most."""
    cut = next(dim for dim in range(len(shape)) if prod(shape[dim + 1 :]) <= BLOCK)
    step = max(1, BLOCK // max(1, prod(shape[cut + 1 :])))
    for outer in product(*map(range, shape[:cut])):
        for start in range(0, shape[cut], step):
            along = Interval(start, min(start + step, shape[cut]))
            yield (*(Interval(at, at + 1) for at in outer), along, *(Interval(0, size) for size in shape[cut + 1 :]))
