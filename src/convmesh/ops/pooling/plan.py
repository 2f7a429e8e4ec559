"""Planning a pooling: checks, layouts, and this rank's part of each spatial dimension."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, cast

import torch

from ...geometry import (
    AdaptivePooling,
    AdaptiveWindows,
    Dependence,
    Interval,
    PaddedWindows,
    Pooling,
    StridedWindows,
    Window,
    strided_windows,
)
from ...sharding.call import Call, Moved
from ...sharding.errors import refuse
from ...sharding.layout import Layout
from .._core.cached_tensors import Constant
from .._core.tile_plan import TiledPlan, check_memory, plan_sources, plan_targets
from .._core.tiles import Tiling

NamedLayouts = Sequence[tuple[str, Layout]]
AnyPooling = Pooling | AdaptivePooling


@dataclass(frozen=True)
class SpatialDim:
    """One spatial dimension: what this rank owns of it, what its targets read, and which targets read its sources."""

    dim: int
    dependence: Dependence
    sharded: bool
    source_size: int
    target_size: int
    sources: Interval
    read: Interval  # overhangs where a sharded dimension is padded
    targets: Interval
    readers: Interval

    @staticmethod
    def of(dim: int, dependence: Dependence, source_size: int, target_size: int, tiling: Tiling) -> SpatialDim:
        sources, read = (tiling.side(box, dim, source_size) for box in (tiling.sources, tiling.sources_read))
        targets, readers = (tiling.side(box, dim, target_size) for box in (tiling.targets, tiling.readers))
        sizes = source_size, target_size
        return SpatialDim(dim, dependence, dim in tiling.dims, *sizes, sources, read, targets, readers)

    @cached_property
    def padding(self) -> int:
        """The padding that the operator adds. Along a sharded dimension it adds none: the block includes it."""
        return 0 if self.sharded else cast(Window, self.dependence).padding

    @cached_property
    def padded_windows(self) -> PaddedWindows:
        """Adaptive windows over this rank's sources, padded to one length."""
        return PaddedWindows.of(cast(AdaptiveWindows, self.dependence), self.sources, self.readers)

    @cached_property
    def positions(self) -> Constant:
        """The sources that the padded windows read."""
        return Constant(self.padded_windows.positions)

    @cached_property
    def strided_windows(self) -> tuple[StridedWindows, ...]:
        """Adaptive windows over this rank's sources, grouped by equal length and step."""
        return strided_windows(cast(AdaptiveWindows, self.dependence), self.sources, self.readers)


@dataclass(frozen=True)
class PoolPlan(TiledPlan):
    """The layouts and the tile of a pooling, and its spatial dimensions, which start at dimension `first`."""

    spatial_dims: tuple[SpatialDim, ...]  # none on a rank outside of the mesh
    first: int

    @cached_property
    def source_sizes(self) -> list[int]:
        return [spatial.source_size for spatial in self.spatial_dims]

    @cached_property
    def padding(self) -> list[int]:
        return [spatial.padding for spatial in self.spatial_dims]

    def call_with_indices(self, run: Callable[..., Any]) -> Call:
        """Return the `Call` of a max pooling, which returns values and indices."""
        values = self.computed, self.wanted
        return Call(self.operands, (Moved(*values), Moved(*(one.typed(torch.int64) for one in values))), run)

    def readers_shape(self, x: torch.Tensor) -> list[int]:
        """The shape of what this rank computes for the targets that read its sources."""
        return [*x.shape[: self.first], *(len(spatial.readers) for spatial in self.spatial_dims)]


def plan_pool(operator: str, pooling: AnyPooling, linear: bool, source: Layout) -> PoolPlan:
    """Plan the forward pass: input -> output (and indices)."""
    shape = _target_shape(operator, (("input", source),), source, pooling)
    if isinstance(pooling, AdaptivePooling):  # whose output may have any size
        check_memory(source, shape)
    return _pool_plan(plan_targets(source, shape, _dependences(source, pooling), linear), source, shape, pooling)


def plan_pool_backward(
    operator: str, pooling: AnyPooling, gradient: Layout, source: Layout, *indices: Layout
) -> PoolPlan:
    """Plan the backward pass: output gradient and, for max pooling, indices -> input gradient."""
    named = [("grad_output", gradient), *(("indices", layout) for layout in indices)]
    shape = _target_shape(operator, [*named, ("input", source)], source, pooling)
    for name, layout in named:
        if layout.shape != shape:
            raise refuse(operator, f"the output has shape {shape}, and {name} {layout.shape}",
                         [*named, ("input", source)], "give it the output's shape")  # fmt: skip
    return _pool_plan(plan_sources(operator, named, source, _dependences(source, pooling)), source, shape, pooling)


def _dependences(source: Layout, pooling: AnyPooling) -> dict[int, Dependence]:
    """By spatial dimension, which sources each target reads."""
    sizes = source.shape[-pooling.spatial :]
    return dict(enumerate(pooling.dependences(sizes), len(source.shape) - pooling.spatial))


def _pool_plan(plan: TiledPlan, source: Layout, shape: Sequence[int], pooling: AnyPooling) -> PoolPlan:
    """Add this rank's part of each spatial dimension to the plan."""
    tiling, dependences = plan.tiling, _dependences(source, pooling)
    spatial_dims = [] if tiling is None else [
        SpatialDim.of(dim, along, source.shape[dim], shape[dim], tiling) for dim, along in dependences.items()
    ]  # fmt: skip
    return PoolPlan(*plan.fields, tuple(spatial_dims), min(dependences))


def _target_shape(operator: str, tensors: NamedLayouts, source: Layout, pooling: AnyPooling) -> tuple[int, ...]:
    """Check the arguments as torch does, and return the output's shape."""
    named = [*tensors, ("geometry", pooling)]
    spatial = pooling.spatial
    if len(source.shape) not in (spatial + 1, spatial + 2):
        raise refuse(operator, f"an input of {len(source.shape)} dimensions", named,
                     f"give {spatial} spatial dimensions after channels, or after batch and channels")  # fmt: skip
    for window in pooling.windows if isinstance(pooling, Pooling) else ():
        if min(window.kernel, window.stride, window.dilation) < 1 or window.padding < 0:
            raise refuse(operator, "kernel, stride and dilation must be positive, padding not negative", named,
                         "use positive numbers")  # fmt: skip
        if window.padding > window.extent // 2:
            raise refuse(operator, f"padding (={window.padding}) may be at most half of the kernel's extent "
                         f"(={window.extent})", named, "pad with F.pad first")  # fmt: skip
    sizes = pooling.target_size(source.shape[-spatial:])
    if min(sizes) < pooling.smallest or min(source.shape[-spatial:]) < 1:
        raise refuse(operator, f"an output of size {sizes} of an input of size {source.shape[-spatial:]} is too small",
                     named, "use a larger input, more padding or a smaller kernel")  # fmt: skip
    return (*source.shape[:-spatial], *sizes)
