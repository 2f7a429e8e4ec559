"""Planning an adaptive pooling: each rank pools the parts of windows that it owns, and the owners of the targets
combine them. So a few numbers are sent, however large a window is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from ... import _torch
from ...geometry import AdaptiveWindows, Interval, PaddedWindows, StridedWindows, strided_windows
from ...sharding.errors import refuse
from ...sharding.layout import Layout
from ...sharding.plan_cache import planned
from .._core.cached_tensors import Numbers
from .._core.tile_plan import TiledPlan, ask_for_memory, plan_sources, plan_targets
from .._core.tiles import Tiling

PARTS = "for each window that spans several ranks, one number a channel and rank"


@dataclass(frozen=True)
class Side:
    """One spatial dimension: this rank's sources, and the targets whose windows have any of them."""

    dim: int
    windows: AdaptiveWindows
    sources: Interval
    readers: Interval

    @staticmethod
    def of(dim: int, source_size: int, target_size: int, tiling: Tiling) -> Side:
        sources = tiling.side(tiling.sources, dim, source_size)
        readers = tiling.side(tiling.readers, dim, target_size)
        return Side(dim, AdaptiveWindows(source_size, target_size), sources, readers)

    @cached_property
    def padded_windows(self) -> PaddedWindows:
        return PaddedWindows.of(self.windows, self.sources, self.readers)

    @cached_property
    def positions(self) -> Numbers:
        return Numbers(self.padded_windows.positions)

    @cached_property
    def strided_windows(self) -> tuple[StridedWindows, ...]:
        return strided_windows(self.windows, self.sources, self.readers)


@dataclass(frozen=True)
class AdaptivePlan:
    layouts: TiledPlan
    sides: tuple[Side, ...]  # none on a rank outside of the mesh
    target_sizes: tuple[int, ...]

    @property
    def first(self) -> int:
        """The number of the first spatial dimension."""
        return len(self.layouts.computed.shape) - len(self.target_sizes)

    def readers_shape(self, x: torch.Tensor) -> list[int]:
        """Of what this rank has for the targets that read its sources."""
        return [*x.shape[: self.first], *(len(side.readers) for side in self.sides)]


@planned
def plan_adaptive(operator: str, input_spec: _torch.Spec, sizes: tuple[int, ...], linear: bool) -> AdaptivePlan:
    source = Layout.of(input_spec)
    _check(operator, (("input", source),), source, sizes)
    shape = (*source.shape[: len(source.shape) - len(sizes)], *sizes)
    ask_for_memory(source, shape)
    layouts = plan_targets(source, shape, _dependences(source, sizes), linear)
    return AdaptivePlan(layouts, _sides(layouts.tiling, source, sizes), sizes)


@planned
def plan_adaptive_backward(
    operator: str,
    gradient_spec: _torch.Spec,
    input_spec: _torch.Spec,
    indices_spec: _torch.Spec | None,
    spatial: int,
) -> AdaptivePlan:
    source = Layout.of(input_spec)
    named = [("grad_output", Layout.of(gradient_spec))]
    if indices_spec is not None:
        named.append(("indices", Layout.of(indices_spec)))
    sizes = named[0][1].shape[-spatial:]
    _check(operator, [*named, ("input", source)], source, sizes)
    if any(layout.shape != (*source.shape[:-spatial], *sizes) for _, layout in named):
        raise refuse(operator, "the shapes do not belong together", [*named, ("input", source)],
                     "give gradients and indices of the output's shape")  # fmt: skip
    layouts = plan_sources(operator, named, source, _dependences(source, sizes))
    return AdaptivePlan(layouts, _sides(layouts.tiling, source, sizes), sizes)


def _dependences(source: Layout, sizes: tuple[int, ...]) -> dict[int, AdaptiveWindows]:
    first = len(source.shape) - len(sizes)
    return {first + axis: AdaptiveWindows(source.shape[first + axis], size) for axis, size in enumerate(sizes)}


def _sides(tiling: Tiling | None, source: Layout, sizes: tuple[int, ...]) -> tuple[Side, ...]:
    if tiling is None:
        return ()
    first = len(source.shape) - len(sizes)
    return tuple(Side.of(first + axis, source.shape[first + axis], size, tiling) for axis, size in enumerate(sizes))


def _check(operator: str, tensors: Sequence[tuple[str, Layout]], source: Layout, sizes: tuple[int, ...]) -> None:
    spatial = len(sizes)
    if len(source.shape) not in (spatial + 1, spatial + 2):
        raise refuse(operator, f"an input of {len(source.shape)} dimensions", tensors,
                     f"give {spatial} spatial dimensions after channels, or after batch and channels")  # fmt: skip
    if min(sizes) < 0 or min(source.shape[-spatial:]) < 1:
        raise refuse(operator, f"an output of size {sizes} of an input of size {source.shape[-spatial:]}", tensors,
                     "use an input that has spatial indices, and a size that is not negative")  # fmt: skip
