"""Sending rows to ranks that depend on values: the ranks first tell each other the numbers of rows.

Not for compiled code, as the message sizes depend on values.
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
class Route:
    """The routes of this rank's rows to other ranks of a line: a hop per mesh dimension, the last dimension first."""

    hops: tuple[tuple[torch.Tensor, RowSchedule], ...]  # for each hop, the order of rows before it, and what is sent
    line: RankLine

    def send(self, rows: torch.Tensor) -> torch.Tensor:
        """Send one row per element; return the received rows in the order of their sources."""
        for order, schedule in self.hops:
            rows = exchange_rows(schedule, rows[order])
        return rows

    def send_back(self, answers: torch.Tensor) -> torch.Tensor:
        """Return for each element the answer to its row; `answers` are in the order of the rows from `send`."""
        for order, schedule in reversed(self.hops):
            arrived = exchange_rows(schedule.transposed(), answers)
            answers = torch.empty_like(arrived)
            answers[order] = arrived
        return answers


def route_rows(destination: torch.Tensor, mesh: DeviceMesh, mesh_dims: tuple[int, ...]) -> Route:
    """Find the routes of this rank's elements; `destination` holds for each the number of a rank along `mesh_dims`.

    A number out of range raises an IndexError on all ranks of the line.
    """
    line = rank_line(mesh, mesh_dims)
    nowhere = (destination < 0) | (destination >= line.size)
    destination, lost = destination.masked_fill(nowhere, 0), nowhere.sum()
    hops: list[tuple[torch.Tensor, RowSchedule]] = []
    for number, (size, group) in reversed(list(enumerate(zip(line.sizes, line.groups, strict=True)))):
        last = destination % size
        counts = torch.bincount(last, minlength=size)
        # Every rank sends every other the number of rows for it, and the number of invalid destinations it knows of.
        one_each = RowSchedule(group, [1] * size, [1] * size)
        received = exchange_rows(one_each, torch.stack([counts, lost.expand(size)], 1))
        lost = received[:, 1].sum()
        schedule = RowSchedule(group, counts.tolist(), received[:, 0].tolist())
        hops.append((last.argsort(stable=True), schedule))
        if number:
            destination = exchange_rows(schedule, (destination // size)[hops[-1][0]])
    if missed := int(lost):
        raise IndexError(f"{missed} indices are out of range")
    return Route(tuple(hops), line)


def owners(index: torch.Tensor, shards: Shards) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the owner of each index of a sharded dimension (-1 if out of range), and start and length of its shard.

    It is computed arithmetically, so that nothing grows with the number of ranks.
    """
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
