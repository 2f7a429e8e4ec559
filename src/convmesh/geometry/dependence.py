"""Which sources the targets of an operator read along one dimension, and both dimensions sharded over the same ranks.

`Window`, `AdaptiveWindows`, `Repeat` and `Taps` (resampling) are dependences; halos follow from them alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

from .halo_plan import HaloPlan, Reads
from .interval import Interval
from .moves import Parts
from .shards import Shards


class Dependence(Protocol):
    """What each target reads: a run of sources, whose first and last never fall from one target to the next."""

    def reads(self, target: Interval, /) -> Interval:
        """The sources from the first to the last that `target` reads; overhangs the dimension where it is padded."""
        ...

    def read_by(self, source: Interval, /) -> Interval:
        """The targets from the first to the last that read anything of `source`."""
        ...

    def parts_read(self, target: Interval, /) -> Parts:
        """`reads` in rising parts, without gaps that are worth leaving out."""
        return (self.reads(target),)

    def parts_read_by(self, source: Interval, /) -> Parts:
        """`read_by`, likewise."""
        return (self.read_by(source),)


@dataclass(frozen=True)
class Repeat(Dependence):
    """Target `t` reads source `t // factor`: the transpose of a window that steps by its own length."""

    factor: int

    def reads(self, target: Interval) -> Interval:
        return Interval(target.start // self.factor, -(-target.stop // self.factor)) if target else Interval(0, 0)

    def read_by(self, source: Interval) -> Interval:
        return Interval(source.start * self.factor, source.stop * self.factor)


@dataclass(frozen=True)
class ShardedDependence:
    """A source and a target dimension sharded over the same ranks, each in the layout of its own size."""

    dependence: Dependence
    source_size: int
    target_size: int
    mesh_sizes: tuple[int, ...]

    @cached_property
    def sources(self) -> Shards:
        """What each rank owns of the sources."""
        return Shards(self.source_size, self.mesh_sizes)

    @cached_property
    def targets(self) -> Shards:
        """What each rank owns of the targets."""
        return Shards(self.target_size, self.mesh_sizes)

    @cached_property
    def source_plan(self) -> HaloPlan:
        """Each rank needs the sources that its targets read; this overhangs where the operator pads."""
        return HaloPlan(self.sources, Reads(self.targets, self.dependence.parts_read, self.dependence.read_by))

    @cached_property
    def target_plan(self) -> HaloPlan:
        """Each rank needs the targets that read its sources."""
        return HaloPlan(self.targets, Reads(self.sources, self._parts_read_by, self.dependence.reads))

    def _parts_read_by(self, source: Interval) -> Parts:
        everything = Interval(0, self.target_size)
        return tuple(part & everything for part in self.dependence.parts_read_by(source))

    def read_by(self, source: Interval) -> Interval:
        """The targets that read any of `source`."""
        return self.dependence.read_by(source) & Interval(0, self.target_size)

    def inner_targets(self, rank: int) -> Interval:
        """The part of a rank's targets that reads nothing of other ranks."""
        return _between(self.targets[rank], self.sources[rank], self.source_size, self.dependence.read_by)

    def inner_sources(self, rank: int) -> Interval:
        """The part of a rank's sources that no target of other ranks reads."""
        return _between(self.sources[rank], self.targets[rank], self.target_size, self.dependence.reads)


def _between(own: Interval, others: Interval, size: int, touches: Callable[[Interval], Interval]) -> Interval:
    """`own` without what the indices before and behind `others`, of a dimension of `size`, touch of it."""
    start = touches(Interval(others.start - 1, others.start)).stop if others.start > 0 else own.start
    stop = touches(Interval(others.stop, others.stop + 1)).start if others.stop < size else own.stop
    return own & Interval(start, stop)
