"""Flat positions in a spatial plane or volume, as max pooling returns them, between a rank's block and the whole."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch

from .. import _torch

# Positions that are moved at once: they, and what is made on the way, stay in a CPU's cache.
IN_CACHE = 1 << 14


def coordinates(flat: torch.Tensor, sizes: Sequence[int]) -> list[torch.Tensor]:
    """The index along each dimension of positions in a volume of these sizes."""
    found = []
    for size in reversed(sizes[1:]):
        found.append(flat % size)
        flat = flat.div(size, rounding_mode="floor")
    return [flat, *reversed(found)]


def flatten(along: Sequence[torch.Tensor], sizes: Sequence[int]) -> torch.Tensor:
    """The positions in a volume of these sizes of an index along each dimension."""
    flat = along[0]
    for index, size in zip(along[1:], sizes[1:], strict=True):
        flat = flat * size + index
    return flat


def shifted(flat: torch.Tensor, sizes: Sequence[int], by: Sequence[int], new_sizes: Sequence[int]) -> torch.Tensor:
    """Positions in a volume of `sizes` as positions in one of `new_sizes`, whose origin lies `by` before theirs.

    Divisions are slow, so there is one only for each dimension whose size changes, and none for the others.
    """
    step, terms = 0, []
    for axis, (shift, size, new_size) in enumerate(zip(by, sizes, new_sizes, strict=True)):
        behind = prod(new_sizes[axis + 1 :])
        step += shift * behind
        if axis and size != new_size:
            # One more of this dimension for each index of those before it.
            terms.append((prod(sizes[axis:]), (new_size - size) * behind))
    if not step and not terms:
        return flat
    if not flat.is_cpu or not flat.is_contiguous() or _torch.tracing():
        return _moved(flat, step, terms)
    result = torch.empty_like(flat)
    for part, room in zip(flat.view(-1).split(IN_CACHE), result.view(-1).split(IN_CACHE), strict=True):
        _moved(part, step, terms, out=room)
    return result


def _moved(
    flat: torch.Tensor, step: int, terms: Sequence[tuple[int, int]], out: torch.Tensor | None = None
) -> torch.Tensor:
    """Positions and `step`, and for each of `terms` how often it fits, times what it changes by."""
    result = flat + step if out is None else torch.add(flat, step, out=out)
    for divisor, change in terms:
        result.add_(_quotient(flat, divisor), alpha=change)
    return result


def _quotient(flat: torch.Tensor, by: int) -> torch.Tensor:
    """Rounded down. CPUs divide float64 much faster than integers, and positions are small enough to be exact in it."""
    if flat.is_cpu:
        return flat.double().div_(by).long()
    return flat.div(by, rounding_mode="trunc")
