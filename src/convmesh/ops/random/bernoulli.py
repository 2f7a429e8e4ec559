"""Bernoulli numbers as one CPU draws them, where each rank only makes its own shard.

The generator must give a number for every element, which takes half as long as torch takes to make a 0 or 1 of it.
Ranks with many numbers to draw share that work. Numbers are drawn in blocks that stay in the cache, so nothing of the
full tensor's size is allocated.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from itertools import product
from math import ceil, prod

import torch
from torch.distributed.device_mesh import DeviceMesh

from ... import _torch
from ...comm import Held, all_reduce
from ...geometry import Box, Interval
from ...kernels.mt19937 import advanced, can_advance, is_generator_of
from ...sharding.layout import Layout
from ...sharding.plan_cache import planned
from .noted_draws import note
from .partitioned_draw import Share, plan_share

BITS = 53
BLOCK = 1 << 17
WORDS = 2  # that the generator gives for one number


def bernoulli_shard(
    layout: Layout, device: torch.device, into: torch.Tensor | None, p: float, generator: torch.Generator | None
) -> torch.Tensor | None:
    """Return this rank's shard of what `bernoulli_(p)` draws on one device, in `into` or in a new tensor.

    None, with nothing done, where torch is not known to draw one number per element in storage order.
    """
    if not is_generator_of(device) or not 0 <= p <= 1 or _torch.tracing() or not _is_dense(layout):
        return None
    share = plan_share(layout.spec)
    shared = share is not None and share.pays() and _all_can_share(layout.mesh)
    if not shared and not _uses_64_bits_per_element():
        return None
    note(layout, device, generator)
    if not layout.sharded_dims:
        return torch.empty_strided(layout.shape, layout.stride, dtype=layout.dtype).bernoulli_(p, generator=generator)
    order = layout.memory_order
    own = tuple(layout.own(dim) for dim in order)
    result = into.permute(order) if into is not None else torch.empty([len(side) for side in own], dtype=layout.dtype)
    if share is not None and shared:
        drawn = _draw_share(share, p, generator or torch.default_generator)
        result.copy_(share.exchange(drawn).reshape(result.shape))
    else:
        _draw_all(result, tuple(layout.shape[dim] for dim in order), own, p, generator)
    return result.permute(layout.back_from_memory_order)


@planned
def _all_can_share(mesh: DeviceMesh) -> bool:
    """Whether all ranks can share. They may run on different CPUs; those that can would wait forever for the others."""
    able = torch.tensor([float(_uses_64_bits_per_element() and can_advance())])
    return bool(all_reduce(able, mesh, range(mesh.ndim), "min").item())


def _draw_share(share: Share, p: float, generator: torch.Generator) -> torch.Tensor:
    """Draw this rank's share for itself and others. Afterwards the generator is in the state after the full tensor."""
    result = torch.empty(sum(map(len, share.drawn)), dtype=torch.bool)
    longest = max(map(len, share.drawn), default=0)
    numbers, filled, at = torch.empty(min(BLOCK, longest), dtype=torch.int64), 0, 0
    for part in (*share.drawn, Interval(share.total, share.total)):
        if part.start > at:
            generator.set_state(advanced(generator.get_state(), WORDS * (part.start - at)))
        for start in range(part.start, part.stop, BLOCK):
            drawn = numbers[: part.stop - start].random_(generator=generator)
            _below_threshold(drawn, p, out=result[filled : filled + len(drawn)])
            filled += len(drawn)
        at = part.stop
    return result


def _draw_all(
    result: torch.Tensor, shape: tuple[int, ...], own: Box, p: float, generator: torch.Generator | None
) -> None:
    """Draw the full tensor, and keep this rank's shard."""
    numbers, dims = torch.empty(min(BLOCK, prod(shape)), dtype=torch.int64), tuple(range(len(shape)))
    for block in _blocks(shape):
        sizes = [len(side) for side in block]
        drawn = numbers[: prod(sizes)].random_(generator=generator)
        common = tuple(a & b for a, b in zip(block, own, strict=True))
        if all(common):
            ones = Held.own(_below_threshold(drawn, p).view(sizes), dims, block).read(common)
            Held.own(result, dims, own).read(common).copy_(ones)


def _is_dense(layout: Layout) -> bool:
    """Whether a tensor has no gaps in its storage and does not overlap itself."""
    step = 1
    for dim in reversed(layout.memory_order):
        if layout.shape[dim] != 1 and layout.stride[dim] != step:
            return False
        step *= layout.shape[dim]
    return True


def _below_threshold(numbers: torch.Tensor, p: float, out: torch.Tensor | None = None) -> torch.Tensor:
    """Return which numbers give a 1: those whose last 53 bits, as a fraction, are less than `p`. Changes `numbers`."""
    return torch.lt(numbers.bitwise_and_(2**BITS - 1), ceil(p * 2**BITS), out=out)


@cache
def _uses_64_bits_per_element() -> bool:
    """Whether torch makes every element of 64 bits of the generator like this. On some CPUs it calls a library."""
    p, elements = 0.3, 1000
    torch_generator, own_generator = torch.Generator(), torch.Generator()
    expected = torch.empty(elements).bernoulli_(p, generator=torch_generator)
    found = _below_threshold(torch.empty(elements, dtype=torch.int64).random_(generator=own_generator), p)
    return torch.equal(expected, found.float()) and torch.equal(torch_generator.get_state(), own_generator.get_state())


def _blocks(shape: tuple[int, ...]) -> Iterator[Box]:
    """Iterate over a tensor in boxes that follow each other in storage, with at most `BLOCK` elements each."""
    split = next(dim for dim in range(len(shape)) if prod(shape[dim + 1 :]) <= BLOCK)
    step = max(1, BLOCK // max(1, prod(shape[split + 1 :])))
    for outer in product(*map(range, shape[:split])):
        for start in range(0, shape[split], step):
            along = Interval(start, min(start + step, shape[split]))
            yield (*(Interval(at, at + 1) for at in outer), along, *(Interval(0, size) for size in shape[split + 1 :]))
