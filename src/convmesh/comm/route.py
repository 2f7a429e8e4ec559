"""Sending numbers to ranks that only the numbers themselves tell: how many go where is said first.

Not for compiled code: what travels depends on values.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch.distributed.device_mesh import DeviceMesh

from .. import _torch
from ..geometry import Interval
from .rank_line import Line, line
from .reduce import side_by_side


@dataclass(frozen=True)
class Route:
    """Which of this rank's elements go to which rank of the line, and how many any has for any other."""

    order: torch.Tensor  # this rank's elements, by the rank that they go to
    counts: tuple[tuple[int, ...], ...]  # by source and destination
    line: Line

    @staticmethod
    def to(destination: torch.Tensor, mesh: DeviceMesh, mesh_dims: tuple[int, ...]) -> Route:
        """`destination` is for each of this rank's elements the number of a rank along `mesh_dims`.

        One that is no rank's raises an IndexError on all ranks of the line.
        """
        along = line(mesh, mesh_dims)
        nowhere = (destination < 0) | (destination >= along.size)
        counted = torch.bincount(destination.masked_fill(nowhere, along.size), minlength=along.size + 1)
        *columns, lost = zip(*side_by_side(counted, mesh, mesh_dims).tolist(), strict=True)
        if any(lost):
            raise IndexError(f"{sum(lost)} indices are out of range")
        return Route(destination.argsort(stable=True), tuple(zip(*columns, strict=True)), along)

    def send(self, values: torch.Tensor) -> torch.Tensor:
        """One row of values for each element; what comes in is in the order of its sources."""
        return self._send(values[self.order], self.counts)

    def send_back(self, answers: torch.Tensor) -> torch.Tensor:
        """For each element the answer to what was sent of it; `answers` are in the order in which that came in."""
        arrived = self._send(answers, tuple(zip(*self.counts, strict=True)))
        result = torch.empty_like(arrived)
        result[self.order] = arrived
        return result

    def _send(self, rows: torch.Tensor, counts: tuple[tuple[int, ...], ...]) -> torch.Tensor:
        """Rows in the order of their destinations; `counts` by source and destination."""
        length = prod(rows.shape[1:])
        messages = [part.reshape(-1) for part in rows.split(counts[self.line.rank])]
        arrived = _torch.wait(self.line.send(messages, lambda src, dst: counts[src][dst] * length))
        # Rows of nothing are counted too: a rank may hold none of what they have along a cut dimension.
        return arrived.view(sum(row[self.line.rank] for row in counts), *rows.shape[1:])


def owner_of(index: torch.Tensor, parts: Sequence[Interval]) -> torch.Tensor:
    """Which of `parts` has each index: the last that begins at or before it, as others that do end before it.

    -1 for what lies outside of all of them.
    """
    starts = torch.tensor([part.start for part in parts], dtype=index.dtype, device=index.device)
    found = torch.bucketize(index.contiguous(), starts, right=True) - 1
    return found.masked_fill(index >= max(part.stop for part in parts), -1)
