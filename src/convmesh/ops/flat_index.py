"""Flat positions in a spatial plane or volume, as max pooling returns them, between a rank's block and the whole."""

from __future__ import annotations

from collections.abc import Sequence

import torch


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
    """Positions in a volume of `sizes` as positions in one of `new_sizes`, whose origin lies `by` before theirs."""
    if not any(by) and tuple(sizes) == tuple(new_sizes):
        return flat
    if not any(by[1:]) and tuple(sizes[1:]) == tuple(new_sizes[1:]):
        row = 1
        for size in sizes[1:]:
            row *= size
        return flat + by[0] * row
    return flatten([index + step for index, step in zip(coordinates(flat, sizes), by, strict=True)], new_sizes)
