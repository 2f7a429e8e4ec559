"""Cutting another dimension than before, over the same ranks: everyone sends everyone a block."""

from __future__ import annotations

from math import prod

import torch

from .. import _torch
from ..geometry import shards
from .rank_line import Line


def swap(tensor: torch.Tensor, cut: int, size: int, wanted: int, line: Line) -> torch.Tensor:
    """From a tensor whose dimension `cut`, of `size` in all, is cut over the line to one where `wanted` is."""
    before, after = shards(size, line.sizes), shards(tensor.shape[wanted], line.sizes)
    rest = prod(length for dim, length in enumerate(tensor.shape) if dim not in (cut, wanted))

    mine = after[line.rank]
    # What a rank keeps stays where it is; but for the compiler, to which every rank has to use what it receives.
    keeps = not _torch.tracing()

    def count(src: int, dst: int) -> int:
        return 0 if keeps and src == dst else before[src].size * after[dst].size * rest

    kept = tensor.narrow(wanted, mine.start, mine.size)
    parts = [
        tensor.narrow(wanted, part.start, part.size if count(line.rank, dst) else 0) for dst, part in enumerate(after)
    ]
    arriving = line.send([part.reshape(-1) for part in parts], count)
    shape = list(kept.shape)
    shape[cut] = size
    result = tensor.new_empty(shape)
    places = [result.narrow(cut, part.start, part.size) for part in before]
    if keeps:
        places[line.rank].copy_(kept)
    received = _torch.wait(arriving).split([count(src, line.rank) for src in range(line.size)])
    for place, part in zip(places, received, strict=True):
        if part.numel():
            place.copy_(part.view(place.shape))
    return result
