"""One index of a cut dimension, from the rank that owns it to all others along the line."""

from __future__ import annotations

from math import prod

import torch

from ..geometry import HaloPlan, Interval, shards
from .blocks import Held
from .exchange import Halo, start
from .rank_line import Line


def owner_plan(size: int, index: int, mesh_sizes: tuple[int, ...]) -> HaloPlan:
    return HaloPlan(size, shards(size, mesh_sizes), ((Interval(index, index + 1),),) * prod(mesh_sizes))


def from_owner(
    tensor: torch.Tensor, dim: int, plan: HaloPlan, line: Line | None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The index of `dim` on every rank, and the message that it came with; without a line this rank has it."""
    held = Held.own(tensor, (dim,), (plan.owned[0 if line is None else line.rank],))
    wanted, received = plan.needed[0], None
    if line is not None:
        pending = start([held], [Halo(0, plan, wanted)], line)
        held, received = held.plus(pending.finish()[0]), pending.received
    return held.read(wanted), received
