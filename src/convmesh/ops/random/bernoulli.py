"""Zeros and ones of one CPU, of which a rank makes its own only.

The generator has to give a number for every element, which takes half as long as making a one or a zero of it as torch
does. Ranks that have many numbers to draw share them. Numbers are drawn in blocks that stay in the cache, so that
nothing of the full tensor's size is needed.
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
WORDS = 2  # of the generator, for one number


def zeros_and_ones(
    layout: Layout, device: torch.device, into: torch.Tensor | None, p: float, generator: torch.Generator | None
) -> torch.Tensor | None:
    """This rank's part of what torch fills a tensor with by `bernoulli_(p)`: in new memory if there is no `into`.

    None, and nothing done, where that is not known to be made of one number for each element, in the order of memory.
    """
    if not is_generator_of(device) or not 0 <= p <= 1 or _torch.tracing() or not _fills_memory(layout):
        return None
    share = plan_share(layout.spec)
    together = share is not None and share.pays() and _all_can_share(layout.mesh)
    if not together and not _one_by_one():
        return None
    note(layout, device, generator)
    if not layout.sharded_dims:
        return torch.empty_strided(layout.shape, layout.stride, dtype=layout.dtype).bernoulli_(p, generator=generator)
    order = layout.memory_order
    own = tuple(layout.own(dim) for dim in order)
    result = into.permute(order) if into is not None else torch.empty([len(side) for side in own], dtype=layout.dtype)
    if share is not None and together:
        drawn = _draw_share(share, p, generator or torch.default_generator)
        result.copy_(share.handed_out(drawn).reshape(result.shape))
    else:
        _draw_all(result, tuple(layout.shape[dim] for dim in order), own, p, generator)
    return result.permute(layout.back_from_memory_order)


@planned
def _all_can_share(mesh: DeviceMesh) -> bool:
    """Ranks may run on different CPUs, and what one of them cannot do none does: they would wait for it for ever."""
    able = torch.tensor([float(_one_by_one() and can_advance())])
    return bool(all_reduce(able, mesh, range(mesh.ndim), "min").item())


def _draw_share(share: Share, p: float, generator: torch.Generator) -> torch.Tensor:
    """What a rank draws for itself and others. Its generator ends where it is after all of the tensor."""
    result = torch.empty(sum(map(len, share.drawn)), dtype=torch.bool)
    longest = max(map(len, share.drawn), default=0)
    numbers, filled, at = torch.empty(min(BLOCK, longest), dtype=torch.int64), 0, 0
    for part in (*share.drawn, Interval(share.total, share.total)):
        if part.start > at:
            generator.set_state(advanced(generator.get_state(), WORDS * (part.start - at)))
        for start in range(part.start, part.stop, BLOCK):
            drawn = numbers[: part.stop - start].random_(generator=generator)
            _decide(drawn, p, out=result[filled : filled + len(drawn)])
            filled += len(drawn)
        at = part.stop
    return result


def _draw_all(
    result: torch.Tensor, shape: tuple[int, ...], own: Box, p: float, generator: torch.Generator | None
) -> None:
    """All of the tensor, and fill in one's own."""
    numbers, dims = torch.empty(min(BLOCK, prod(shape)), dtype=torch.int64), tuple(range(len(shape)))
    for block in _blocks(shape):
        sizes = [len(side) for side in block]
        drawn = numbers[: prod(sizes)].random_(generator=generator)
        common = tuple(a & b for a, b in zip(block, own, strict=True))
        if all(common):
            ones = Held.own(_decide(drawn, p).view(sizes), dims, block).read(common)
            Held.own(result, dims, own).read(common).copy_(ones)


def _fills_memory(layout: Layout) -> bool:
    """Whether a tensor leaves no gaps in memory and does not overlap itself."""
    step = 1
    for dim in reversed(layout.memory_order):
        if layout.shape[dim] != 1 and layout.stride[dim] != step:
            return False
        step *= layout.shape[dim]
    return True


def _decide(numbers: torch.Tensor, p: float, out: torch.Tensor | None = None) -> torch.Tensor:
    """The last bits of a number are a fraction, and it is a one if that is less than `p`. Numbers become these bits."""
    return torch.lt(numbers.bitwise_and_(2**BITS - 1), ceil(p * 2**BITS), out=out)


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
    split = next(dim for dim in range(len(shape)) if prod(shape[dim + 1 :]) <= BLOCK)
    step = max(1, BLOCK // max(1, prod(shape[split + 1 :])))
    for outer in product(*map(range, shape[:split])):
        for start in range(0, shape[split], step):
            along = Interval(start, min(start + step, shape[split]))
            yield (*(Interval(at, at + 1) for at in outer), along, *(Interval(0, size) for size in shape[split + 1 :]))
