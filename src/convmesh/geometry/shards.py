"""The shards of a dimension as DTensor lays them out."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import overload

from .interval import Interval


@dataclass(frozen=True)
class Shards(Sequence[Interval]):
    """The interval that each rank owns of a dimension sharded over mesh dimensions of these sizes, outermost first.

    Ranks are in row-major order over the mesh dimensions, which is also the order of what they own. Every mesh
    dimension divides as `torch.chunk` does: equal shards, rounded up, so that the last ones may be smaller or empty.
    Nothing is stored per rank: a shard, and the owner of an index, are computed.
    """

    size: int
    mesh_sizes: tuple[int, ...]

    def __len__(self) -> int:
        return prod(self.mesh_sizes)

    @overload
    def __getitem__(self, rank: int) -> Interval: ...
    @overload
    def __getitem__(self, rank: slice) -> tuple[Interval, ...]: ...
    def __getitem__(self, rank: int | slice) -> Interval | tuple[Interval, ...]:
        if isinstance(rank, slice):
            return tuple(self[one] for one in range(len(self))[rank])
        below = len(self)
        if not 0 <= rank < below:
            raise IndexError(f"no rank {rank} among {below}")
        start, stop = 0, self.size
        for parts in self.mesh_sizes:
            below //= parts
            place, rank = divmod(rank, below)
            step = -((start - stop) // parts)
            start, stop = min(start + step * place, stop), min(start + step * (place + 1), stop)
        return Interval(start, stop)

    def parts(self, rank: int) -> tuple[Interval, ...]:
        return (self[rank],)

    def touching(self, part: Interval) -> Sequence[int]:
        """Return the ranks that own any of `part`, in order."""
        if type(self.size) is not int or type(part.start) is not int or type(part.stop) is not int:
            return range(len(self))  # symbols of a compiler: ranks that own none of it are dropped later
        part = part & Interval(0, self.size)
        if not part:
            return ()
        ranks: Sequence[int] = (0,)
        found = [Interval(0, self.size)]
        for parts in self.mesh_sizes:
            below, found, above, ranks = found, [], ranks, []
            for rank, full in zip(above, below, strict=True):
                step = -((full.start - full.stop) // parts)
                common = full & part
                for place in range((common.start - full.start) // step, -(-(common.stop - full.start) // step)):
                    start = full.start + step * place
                    found.append(Interval(start, min(start + step, full.stop)))
                    ranks.append(rank * parts + place)
        return ranks

    @cached_property
    def runs(self) -> tuple[tuple[int, int], ...]:
        """The shard sizes in rank order, run-length encoded as (size, number of ranks)."""
        if type(self.size) is not int:
            return _merged_runs((part.size, 1) for part in self)
        if not self.mesh_sizes:
            return ((self.size, 1),)
        parts, *rest = self.mesh_sizes
        step = -(-self.size // parts)
        full = self.size // step if step else parts
        left = self.size - full * step
        found = list(Shards(step, tuple(rest)).runs) * (full if len(rest) and full else 0)
        if not rest:
            found = [(step, full)]
        if left:
            found += Shards(left, tuple(rest)).runs
        if idle := parts - full - bool(left):
            found.append((0, idle * prod(rest)))
        return _merged_runs(found)

    def scaled_runs(self, by: int) -> tuple[tuple[int, int], ...]:
        """Return `runs` with each size multiplied by `by`."""
        return _merged_runs((size * by, count) for size, count in self.runs)

    @property
    def busy(self) -> int:
        """The number of ranks that own anything."""
        return sum(count for size, count in self.runs if size)

    @property
    def even(self) -> bool:
        """Whether all ranks own the same amount."""
        return len(self.runs) == 1


def _merged_runs(runs: Iterable[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    merged: list[tuple[int, int]] = []
    for size, count in runs:
        if merged and merged[-1][0] == size:
            merged[-1] = (size, merged[-1][1] + count)
        elif count:
            merged.append((size, count))
    return tuple(merged)


def shards(size: int, mesh_sizes: tuple[int, ...]) -> Shards:
    """Return the shards of a dimension of `size` over mesh dimensions of these sizes, the first one outermost."""
    return Shards(size, mesh_sizes)
