"""What the targets of any operator read of its sources along one dimension, and cutting both over a line of ranks.

`Window` is one such map. Here are those of adaptive pooling, resampling and pixel shuffling.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

from .halo_plan import HaloPlan
from .interval import Interval, shards


class Reading(Protocol):
    """A map between a source and a target dimension. Later targets never read earlier sources than others do."""

    def reads(self, target: Interval, /) -> Interval:
        """The sources from the first to the last that `target` reads."""
        ...

    def read_by(self, source: Interval, /) -> Interval:
        """The targets from the first to the last that read anything of `source`."""
        ...


@dataclass(frozen=True)
class Runs:
    """Target `t` reads the sources `starts[t] <= s < stops[t]`; neither list ever falls."""

    starts: tuple[int, ...]
    stops: tuple[int, ...]

    @staticmethod
    def adaptive(source_size: int, target_size: int) -> Runs:
        """Adaptive pooling: as even a cover as integers permit; neighbours overlap where it does not divide."""
        targets = range(target_size)
        return Runs(
            tuple(t * source_size // target_size for t in targets),
            tuple(-(-(t + 1) * source_size // target_size) for t in targets),
        )

    def reads(self, target: Interval) -> Interval:
        if not target:
            return Interval(0, 0)
        return Interval(self.starts[target.start], self.stops[target.stop - 1])

    def read_by(self, source: Interval) -> Interval:
        if not source:
            return Interval(0, 0)
        start = bisect_right(self.stops, source.start)
        return Interval(start, max(start, bisect_left(self.starts, source.stop)))


@dataclass(frozen=True)
class Repeat:
    """Target `t` reads source `t // factor`: the other way round than a window that steps by its own length."""

    factor: int

    def reads(self, target: Interval) -> Interval:
        return Interval(target.start // self.factor, -(-target.stop // self.factor)) if target else Interval(0, 0)

    def read_by(self, source: Interval) -> Interval:
        return Interval(source.start * self.factor, source.stop * self.factor)


@dataclass(frozen=True)
class Cut:
    """Sources and targets are cut over the same ranks, each in the layout of its own size."""

    reading: Reading
    source_size: int
    target_size: int
    mesh_sizes: tuple[int, ...]

    @cached_property
    def sources(self) -> tuple[Interval, ...]:
        return shards(self.source_size, self.mesh_sizes)

    @cached_property
    def targets(self) -> tuple[Interval, ...]:
        return shards(self.target_size, self.mesh_sizes)

    @cached_property
    def source_plan(self) -> HaloPlan:
        """Each rank produces its targets, and needs the sources that they read."""
        return HaloPlan(self.source_size, self.sources, tuple((self.reading.reads(part),) for part in self.targets))

    @cached_property
    def target_plan(self) -> HaloPlan:
        """Each rank has something to say about the targets that read its sources."""
        return HaloPlan(self.target_size, self.targets, tuple((self.touched(part),) for part in self.sources))

    def touched(self, source: Interval) -> Interval:
        """The targets that read any of `source`."""
        return self.reading.read_by(source) & Interval(0, self.target_size)
