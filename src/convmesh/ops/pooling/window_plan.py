"""Planning a pooling with a fixed window: checks, layouts, and this rank's tile."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ... import _torch
from ...geometry import Interval, Pooling, Window
from ...sharding.errors import refuse
from ...sharding.layout import Layout
from ...sharding.plan_cache import planned
from .._core.tile_plan import TiledPlan, plan_sources, plan_targets
from .._core.tiles import Tiling


@dataclass(frozen=True)
class LocalPooling:
    """A pooling of one rank's tile. Along sharded dimensions a block has its padding with it; along others the operator
    pads."""

    pooling: Pooling
    source_sizes: tuple[int, ...]
    target_sizes: tuple[int, ...]
    first: int  # the number of the first spatial dimension
    tiling: Tiling

    def is_sharded(self, axis: int) -> bool:
        return axis + self.first in self.tiling.dims

    def targets(self, axis: int) -> Interval:
        return self.tiling.side(self.tiling.targets, axis + self.first, self.target_sizes[axis])

    def read(self, axis: int) -> Interval:
        """The sources that this rank's targets read; overhangs where it is padded."""
        return self.tiling.side(self.tiling.sources_read, axis + self.first, self.source_sizes[axis])

    @property
    def kernel(self) -> list[int]:
        return [window.kernel for window in self.pooling.windows]

    @property
    def stride(self) -> list[int]:
        return [window.stride for window in self.pooling.windows]

    @property
    def dilation(self) -> list[int]:
        return [window.dilation for window in self.pooling.windows]

    @property
    def padding(self) -> list[int]:
        """What is left to the operator."""
        return [0 if self.is_sharded(axis) else window.padding for axis, window in enumerate(self.pooling.windows)]


@dataclass(frozen=True)
class PoolPlan:
    layouts: TiledPlan
    local: LocalPooling | None  # None on a rank outside of the mesh


@planned
def plan_pool(operator: str, input_spec: _torch.Spec, pooling: Pooling, linear: bool) -> PoolPlan:
    source = Layout.of(input_spec)
    sizes = _check(operator, (("input", source),), source, pooling)
    first = len(source.shape) - len(pooling.windows)
    layouts = plan_targets(source, (*source.shape[:first], *sizes), _dependences(first, pooling), linear)
    return _localized(layouts, source, pooling)


@planned
def plan_pool_backward(
    operator: str,
    gradient_spec: _torch.Spec,
    input_spec: _torch.Spec,
    indices_spec: _torch.Spec | None,
    pooling: Pooling,
) -> PoolPlan:
    source = Layout.of(input_spec)
    named = [("grad_output", Layout.of(gradient_spec))]
    if indices_spec is not None:
        named.append(("indices", Layout.of(indices_spec)))
    sizes = _check(operator, [*named, ("input", source)], source, pooling)
    first = len(source.shape) - len(pooling.windows)
    shape = (*source.shape[:first], *sizes)
    for name, layout in named:
        if layout.shape != shape:
            raise refuse(operator, f"the output has shape {shape}, and {name} {layout.shape}",
                         [*named, ("input", source)], "give it the output's shape")  # fmt: skip
    return _localized(plan_sources(operator, named, source, _dependences(first, pooling)), source, pooling)


def _dependences(first: int, pooling: Pooling) -> dict[int, Window]:
    return {first + axis: window for axis, window in enumerate(pooling.windows)}


def _localized(layouts: TiledPlan, source: Layout, pooling: Pooling) -> PoolPlan:
    first = len(source.shape) - len(pooling.windows)
    sizes = source.shape[first:]
    if layouts.tiling is None:
        return PoolPlan(layouts, None)
    return PoolPlan(layouts, LocalPooling(pooling, sizes, pooling.target_size(sizes), first, layouts.tiling))


def _check(operator: str, tensors: Sequence[tuple[str, Layout]], source: Layout, pooling: Pooling) -> tuple[int, ...]:
    """The sizes of the targets, if the arguments give any."""
    named = [*tensors, ("geometry", pooling)]
    spatial = len(pooling.windows)
    if len(source.shape) not in (spatial + 1, spatial + 2):
        raise refuse(operator, f"an input of {len(source.shape)} dimensions", named,
                     f"give {spatial} spatial dimensions after channels, or after batch and channels")  # fmt: skip
    for window in pooling.windows:
        if min(window.kernel, window.stride, window.dilation) < 1 or window.padding < 0:
            raise refuse(operator, "kernel, stride and dilation must be positive, padding not negative", named,
                         "use positive numbers")  # fmt: skip
        if window.padding > window.extent // 2:
            raise refuse(operator, f"padding (={window.padding}) may be at most half of the kernel's extent "
                         f"(={window.extent})", named, "pad with F.pad first")  # fmt: skip
    sizes = pooling.target_size(source.shape[-spatial:])
    if min(sizes) <= 0 or min(source.shape[-spatial:]) <= 0:
        raise refuse(operator, f"the output's size {sizes} is too small", named,
                     "use a larger input, more padding or a smaller kernel")  # fmt: skip
    return sizes
