"""From any boxes of a tensor that ranks own to any others: every two ranks send each other what their boxes share."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .. import _torch
from ..geometry import Box, volume
from .blocks import Block, Held
from .rank_line import Line


def rebox(tensor: torch.Tensor, owned: Sequence[Box], wanted: Sequence[Box], line: Line) -> torch.Tensor:
    """This rank's wanted box. `owned` and `wanted` have a side for every dimension, and a box for every rank; those
    that are owned do not overlap."""
    dims, here = tuple(range(tensor.dim())), line.rank

    def shared(src: int, dst: int) -> Box:
        return tuple(a & b for a, b in zip(owned[src], wanted[dst], strict=True))

    own = Held.own(tensor, dims, owned[here])
    parts = [shared(here, dst) for dst in range(line.size)]
    messages = [own.read(part).reshape(-1) if volume(part) else tensor.reshape(-1)[:0] for part in parts]
    received = _torch.wait(line.send(messages, lambda src, dst: volume(shared(src, dst))))
    blocks, at = [], 0
    for part in (shared(src, here) for src in range(line.size)):
        data = received[at : at + volume(part)]
        blocks.append(Block(part, data.view([len(side) for side in part])))
        at += volume(part)
    return Held(dims, tuple(blocks)).read(wanted[here])
