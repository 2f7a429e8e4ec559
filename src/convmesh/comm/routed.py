"""Sending rows to ranks that only the values tell: how many go where is said first.

Not for compiled code: what is sent depends on values.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.distributed.device_mesh import DeviceMesh

from ..geometry import Shards
from .exchange import exchange_rows
from .rank_line import RankLine, rank_line
from .schedule import RowSchedule


@dataclass(frozen=True)
class Routed:
    """This rank's rows on their way to the ranks of a line, one mesh dimension after the other, the last one first."""

    hops: tuple[tuple[torch.Tensor, RowSchedule], ...]  # the rows' order before a hop, and what is sent in it
    line: RankLine

    def send(self, rows: torch.Tensor) -> torch.Tensor:
        """One row of values for each element; what comes in is in the order of its sources."""
        for order, schedule in self.hops:
            rows = exchange_rows(schedule, rows[order])
        return rows

    def send_back(self, answers: torch.Tensor) -> torch.Tensor:
        """For each element the answer to what was sent of it; `answers` are in the order in which that came in."""
        for order, schedule in reversed(self.hops):
            arrived = exchange_rows(schedule.transposed(), answers)
            answers = torch.empty_like(arrived)
            answers[order] = arrived
        return answers


def routed(destination: torch.Tensor, mesh: DeviceMesh, mesh_dims: tuple[int, ...]) -> Routed:
    """`destination` is for each of this rank's elements the number of a rank along `mesh_dims`.

    One that is no rank's raises an IndexError on all ranks of the line.
    """
    line = rank_line(mesh, mesh_dims)
    nowhere = (destination < 0) | (destination >= line.size)
    destination, lost = destination.masked_fill(nowhere, 0), nowhere.sum()
    hops: list[tuple[torch.Tensor, RowSchedule]] = []
    for number, (size, group) in reversed(list(enumerate(zip(line.sizes, line.groups, strict=True)))):
        last = destination % size
        counts = torch.bincount(last, minlength=size)
        # Every rank tells every other how many rows it has for it, and how many it has heard of that go nowhere.
        told = exchange_rows(RowSchedule(group, [1] * size, [1] * size), torch.stack([counts, lost.expand(size)], 1))
        lost = told[:, 1].sum()
        schedule = RowSchedule(group, counts.tolist(), told[:, 0].tolist())
        hops.append((last.argsort(stable=True), schedule))
        if number:
            destination = exchange_rows(schedule, (destination // size)[hops[-1][0]])
    if missed := int(lost):
        raise IndexError(f"{missed} indices are out of range")
    return Routed(tuple(hops), line)


def owners(index: torch.Tensor, shards: Shards) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """For each index of a sharded dimension the rank that owns it (-1 for what lies outside), and where the shard of
    that rank starts and how long it is. By arithmetic, so that nothing grows with the ranks."""
    outside = (index < 0) | (index >= shards.size)
    index = index.masked_fill(outside, 0)
    rank, start = torch.zeros_like(index), torch.zeros_like(index)
    length = torch.full_like(index, shards.size)
    for parts in shards.mesh_sizes:
        step = -(-length // parts)
        place = (index - start) // step.clamp(min=1)
        rank, start = rank * parts + place, start + place * step
        length = torch.minimum(step, length - place * step)
    return rank.masked_fill(outside, -1), start, length
