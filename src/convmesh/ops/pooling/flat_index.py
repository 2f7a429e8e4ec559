"""Flat indices into a spatial plane or volume, as max pooling returns them: for a block, and for the full tensor."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch

from ...kernels.pooling import quotient


def coordinates(flat: torch.Tensor, sizes: Sequence[int]) -> list[torch.Tensor]:
    """Return the index along each dimension for flat indices into a volume of `sizes`."""
    found = []
    for size in reversed(sizes[1:]):
        found.append(flat % size)
        flat = flat.div(size, rounding_mode="floor")
    return [flat, *reversed(found)]


def flatten(along: Sequence[torch.Tensor], sizes: Sequence[int]) -> torch.Tensor:
    """Return flat indices into a volume of `sizes` for an index along each dimension."""
    flat = along[0]
    for index, size in zip(along[1:], sizes[1:], strict=True):
        flat = flat * size + index
    return flat


def shifted(flat: torch.Tensor, sizes: Sequence[int], by: Sequence[int], new_sizes: Sequence[int]) -> torch.Tensor:
    """Convert flat indices into a volume of `sizes` to one of `new_sizes`, whose origin is `by` before the old one.

    Divisions are slow, so there is one only for each dimension whose size changes.
    """
    step, result = 0, flat
    for axis, (shift, size, new_size) in enumerate(zip(by, sizes, new_sizes, strict=True)):
        behind = prod(new_sizes[axis + 1 :])
        step += shift * behind
        if axis and size != new_size:
            # Each step of the outer dimensions now skips more (or less) of this one.
            result = result.add(quotient(flat, prod(sizes[axis:])), alpha=(new_size - size) * behind)
    if not step:
        return result
    return flat + step if result is flat else result.add_(step)
