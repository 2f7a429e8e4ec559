"""Cutting another dimension than before, over the same ranks: everyone sends everyone a block."""

from __future__ import annotations

from math import prod

import torch

from .. import _torch
from ..geometry import shards
from .line import Line


def swap(tensor: torch.Tensor, cut: int, size: int, wanted: int, line: Line) -> torch.Tensor:
    """From a tensor whose dimension `cut`, of `size` in all, is cut over the line to one where `wanted` is."""
    before, after = shards(size, line.sizes), shards(tensor.shape[wanted], line.sizes)
    rest = prod(length for dim, length in enumerate(tensor.shape) if dim not in (cut, wanted))

    def count(src: int, dst: int) -> int:
        return len(before[src]) * len(after[dst]) * rest

    messages = [tensor.narrow(wanted, part.start, len(part)).reshape(-1) for part in after]
    received = _torch.wait(line.send(messages, count))
    shape = list(tensor.shape)
    shape[wanted] = len(after[line.rank])
    blocks = []
    for src, part in zip(before, received.split([count(src, line.rank) for src in range(line.size)]), strict=True):
        shape[cut] = len(src)
        blocks.append(part.view(shape))
    return torch.cat(blocks, cut)
