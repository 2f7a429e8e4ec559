"""Process groups of a dry run as places of its mesh: along which mesh dimensions their ranks lie."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any, NamedTuple

import torch.distributed as dist

from .. import _torch


class _Group(NamedTuple):
    ranks: list[int]
    rank: int  # this one
    along: tuple[str, ...]


class Groups:
    """The process groups of one rank of a mesh whose ranks are numbered row by row."""

    def __init__(self, mesh: Mapping[str, int]) -> None:
        self._names = tuple(mesh)
        self._sizes = tuple(mesh.values())
        self._known: dict[str, _Group] = {}

    def along(self, group: Any) -> tuple[tuple[str, ...], int]:
        """Return the mesh dimensions along which a group's ranks lie, and how many others there are."""
        found = self._found(group)
        return found.along, len(found.ranks) - 1

    def messages(self, group: Any, counts: Sequence[int], element: int) -> tuple[tuple[int, int], ...]:
        """Return (rank, bytes) of what this rank sends to others in an all-to-all of so many elements to each."""
        ranks, me, _ = self._found(group)
        return tuple((rank, size * element) for rank, size in zip(ranks, counts, strict=True) if size and rank != me)

    def between(self, to: Sequence[tuple[int, int]]) -> tuple[str, ...]:
        """Return the mesh dimensions along which the ranks lie that messages go to."""
        return self._differing([dist.get_rank(), *(rank for rank, _ in to)])

    def _found(self, group: Any) -> _Group:
        key = str(getattr(group, "group_name", group))
        if key not in self._known:
            ranks = dist.get_process_group_ranks(_torch.group_called(group))
            self._known[key] = _Group(ranks, dist.get_rank(), self._differing(ranks))
        return self._known[key]

    def _differing(self, ranks: Sequence[int]) -> tuple[str, ...]:
        return tuple(name for at, name in enumerate(self._names) if len({self._place(one, at) for one in ranks}) > 1)

    def _place(self, rank: int, at: int) -> int:
        return rank // prod(self._sizes[at + 1 :]) % self._sizes[at]
