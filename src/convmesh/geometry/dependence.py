"""Which source indices the targets of an operator read along one dimension, with and without sharding.

`Window`, `AdaptiveWindows`, `Repeat` and `Taps` (resampling) are dependences; halo plans follow from them alone.
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
    """The sources that each target reads: a range whose first and last index never decrease with the target."""

    def reads(self, target: Interval, /) -> Interval:
        """Return the range of sources that `target` reads; it overhangs the dimension where the operator pads."""
        ...

    def read_by(self, source: Interval, /) -> Interval:
        """Return the range from the first to the last target that reads any of `source`."""
        ...

    def parts_read(self, target: Interval, /) -> Parts:
        """Return `reads` as ascending parts, leaving out gaps that are large enough to matter."""
        return (self.reads(target),)

    def parts_read_by(self, source: Interval, /) -> Parts:
        """Return `read_by` as parts, leaving out large gaps."""
        return (self.read_by(source),)


@dataclass(frozen=True)
class Repeat(Dependence):
    """Target `t` reads source `t // factor`: the transpose of a window whose stride equals its length."""

    factor: int

    def reads(self, target: Interval) -> Interval:
        return Interval(target.start // self.factor, -(-target.stop // self.factor)) if target else Interval(0, 0)

    def read_by(self, source: Interval) -> Interval:
        return Interval(source.start * self.factor, source.stop * self.factor)


@dataclass(frozen=True)
class ShardedDependence:
    """A source and a target dimension, each sharded over the same ranks according to its own size."""

    dependence: Dependence
    source_size: int
    target_size: int
    mesh_sizes: tuple[int, ...]

    @cached_property
    def sources(self) -> Shards:
        """The sources that each rank owns."""
        return Shards(self.source_size, self.mesh_sizes)

    @cached_property
    def targets(self) -> Shards:
        """The targets that each rank owns."""
        return Shards(self.target_size, self.mesh_sizes)

    @cached_property
    def source_plan(self) -> HaloPlan:
        """The exchange that brings each rank the sources its targets read; these overhang where the operator pads."""
        return HaloPlan(self.sources, Reads(self.targets, self.dependence.parts_read, self.dependence.read_by))

    @cached_property
    def target_plan(self) -> HaloPlan:
        """The exchange that brings each rank the targets that read its sources."""
        return HaloPlan(self.targets, Reads(self.sources, self._parts_read_by, self.dependence.reads))

    def _parts_read_by(self, source: Interval) -> Parts:
        everything = Interval(0, self.target_size)
        return tuple(part & everything for part in self.dependence.parts_read_by(source))

    def read_by(self, source: Interval) -> Interval:
        """Return the targets that read any of `source`."""
        return self.dependence.read_by(source) & Interval(0, self.target_size)

    def inner_targets(self, rank: int) -> Interval:
        """Return the targets of a rank that read only sources of the same rank."""
        return _between(self.targets[rank], self.sources[rank], self.source_size, self.dependence.read_by)

    def inner_sources(self, rank: int) -> Interval:
        """Return the sources of a rank that only targets of the same rank read."""
        return _between(self.sources[rank], self.targets[rank], self.target_size, self.dependence.reads)


def _between(own: Interval, others: Interval, size: int, touches: Callable[[Interval], Interval]) -> Interval:
    """Return `own` without the indices touched by the index just before or just after `others`.

    `size` is the size of the dimension that `others` belongs to.
    """
    start = touches(Interval(others.start - 1, others.start)).stop if others.start > 0 else own.start
    stop = touches(Interval(others.stop, others.stop + 1)).start if others.stop < size else own.stop
    return own & Interval(start, stop)
