"""Planning an interpolation: the taps of each dimension, and those of this rank's targets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache

import torch

from ... import _torch
from ...geometry import Box, Interval, Taps, TransposedTaps, slabs, taps
from ...kernels.resampling import cubic_copies_equal_sizes, nearest_is_general, nearest_rounds_scales
from ...sharding.errors import refuse
from ...sharding.layout import Layout
from ...sharding.plan_cache import planned
from .._core.tile_plan import TiledPlan, ask_for_memory, plan_targets
from .._core.tiles import LARGEST_BORDER, Tiling
from .weighted_sum import WeightedSum, WeightedSums

AnyTaps = Taps | TransposedTaps


@dataclass(frozen=True)
class Resampling:
    """An upsampling operator's arguments as one value. Going backward, gradients go from targets to sources."""

    mode: str
    sources: tuple[int, ...]
    targets: tuple[int, ...]
    align_corners: bool
    scales: tuple[float | None, ...]
    backward: bool


@dataclass(frozen=True)
class ResamplePlan(TiledPlan):
    """Either all of a rank's targets are weighted sums, or torch's own operator on its local tensor is right for the
    `inner` ones, and `sums` has those of the strips around these."""

    inner: Box | None
    sums: dict[Box, tuple[Box, WeightedSums]]  # by box of targets: what it reads, and how that is summed


@planned
def plan_resample(operator: str, input_spec: _torch.Spec, resampling: Resampling) -> ResamplePlan:
    given = Layout.of(input_spec)
    _check(operator, given, resampling)
    shape = (*given.shape[:2], *(resampling.sources if resampling.backward else resampling.targets))
    ask_for_memory(given, shape)
    mapped = dict(enumerate(_all_taps(given, resampling), 2))
    layouts = plan_targets(given, shape, mapped, True)
    tiling = layouts.tiling
    if tiling is None or not tiling.dims:
        return ResamplePlan(*layouts.fields, None, {})
    if not given.dtype.is_floating_point and "nearest" not in resampling.mode:
        raise refuse(operator, f"dtype {given.dtype} along sharded dimensions", (("input", given),),
                     "cast to a floating point dtype first")  # fmt: skip

    @cache
    def along(dim: int, targets: Interval, start: int) -> WeightedSum | None:
        """How these targets are summed of a block from `start` on; None where they are the block itself."""
        own = mapped[dim].of(targets)
        if all(some == ((at, 1.0),) for at, some in enumerate(own, start)) and shape[dim] == given.shape[dim]:
            return None
        return WeightedSum.of(dim, own, start)

    # What shrinks goes first, so that less is left for the others.
    order = sorted(mapped, key=lambda dim: shape[dim] / given.shape[dim])

    def sums(targets: Box) -> tuple[Box, WeightedSums]:
        read = tiling.reads(targets)
        made = (along(d, tiling.side(targets, d, shape[d]), tiling.side(read, d, given.shape[d]).start) for d in order)
        return read, tuple(one for one in made if one is not None)

    inner = _inner(layouts, tiling, mapped, resampling)
    boxes = [tiling.targets] if inner is None else [box for side in slabs(tiling.targets, inner) for box in side]
    return ResamplePlan(*layouts.fields, inner, {box: sums(box) for box in boxes})


def _inner(layouts: TiledPlan, tiling: Tiling, mapped: Mapping[int, AnyTaps], resampling: Resampling) -> Box | None:
    """The targets for which torch's operator on the local tensor is right; None if these are not nearly all."""
    if resampling.mode.endswith("_aa"):  # torch's antialiasing mistakes the layout of results that are 1 wide
        return None
    if _copies(layouts.computed, resampling, layouts.operands[0].local_shape[2:], layouts.computed.local_shape[2:]):
        return None
    sides = []
    for dim, sources, targets in zip(tiling.dims, tiling.sources, tiling.targets, strict=True):
        if not sources or not targets:
            return None
        right = _right(mapped[dim], resampling, dim, sources, targets, layouts.computed.dtype == torch.float64)
        inside = Interval(*_longest(right)).shift(targets.start)
        if len(inside) < (1 - LARGEST_BORDER) * len(targets):
            return None
        sides.append(inside)
    return tuple(sides)


def _right(
    of_all: AnyTaps, resampling: Resampling, dim: int, sources: Interval, targets: Interval, double: bool
) -> list[bool]:
    """By target: whether the operator has the same taps for it if it knows of these sources only."""
    ends = (len(targets), len(sources)) if resampling.backward else (len(sources), len(targets))
    wanted = of_all.of(targets)
    right = [True] * len(targets)
    # Of nearest neighbours it depends on the sizes by which kernel torch looks for them.
    nearest = {"nearest": ("nearest", "nearest_scaled"), "nearest_exact": ("nearest_exact",)}
    kernels = [(mode, precise) for mode in nearest.get(resampling.mode, ()) for precise in (False, True)]
    for mode, precise in kernels or [(resampling.mode, double)]:
        alone = _directed(mode, *ends, resampling, dim - 2, precise).of(Interval(0, len(targets)))
        for at, (mine, theirs) in enumerate(zip(alone, wanted, strict=True)):
            right[at] &= tuple((source + sources.start, weight) for source, weight in mine) == theirs
    return right


def _directed(mode: str, source: int, target: int, resampling: Resampling, axis: int, double: bool) -> AnyTaps:
    """The taps between sizes along a spatial dimension; going backward those of the gradients."""
    forward = taps(mode, source, target, resampling.align_corners, resampling.scales[axis], double)
    return TransposedTaps(forward) if resampling.backward else forward


def _longest(right: Sequence[bool]) -> tuple[int, int]:
    """The longest run of True, as start and stop."""
    best, start = (0, 0), 0
    for at, true in enumerate((*right, False)):
        if not true:
            best = max(best, (start, at), key=lambda run: run[1] - run[0])
            start = at + 1
    return best


def _all_taps(given: Layout, resampling: Resampling) -> list[AnyTaps]:
    mode, double = resampling.mode, given.dtype == torch.float64
    if "nearest" in mode:
        general = _nearest_is_general(given, resampling)
        double = double and general
        if mode == "nearest" and nearest_rounds_scales(given.mesh.device_type, general):
            mode = "nearest_scaled"
    elif _copies(given, resampling, resampling.sources, resampling.targets):
        mode = "linear"  # of which equal sizes are a copy
    ends = enumerate(zip(resampling.sources, resampling.targets, strict=True))
    return [_directed(mode, source, target, resampling, axis, double) for axis, (source, target) in ends]


def _nearest_is_general(given: Layout, resampling: Resampling) -> bool:
    channels_last = given.memory_format != torch.contiguous_format and given.shape[1] > 3
    return not resampling.backward and nearest_is_general(given.mesh.device_type, resampling.targets, channels_last)


def _copies(given: Layout, resampling: Resampling, sources: Sequence[int], targets: Sequence[int]) -> bool:
    """Whether torch copies all for equal sizes, whatever the scale: so do some kernels for cubic interpolation."""
    copying = cubic_copies_equal_sizes(given.mesh.device_type, resampling.backward)
    return resampling.mode == "cubic" and copying and tuple(sources) == tuple(targets)


def _check(operator: str, given: Layout, resampling: Resampling) -> None:
    spatial = len(resampling.targets)
    named: Sequence[tuple[str, object]] = (("input", given), ("arguments", resampling))
    expected = resampling.targets if resampling.backward else resampling.sources
    if len(given.shape) != spatial + 2 or given.shape[2:] != expected:
        raise refuse(operator, f"an input of shape {given.shape}", named, f"give (N, C) and {spatial} sizes")
    if min(*resampling.sources, *resampling.targets) < 1:
        raise refuse(operator, f"sizes {resampling.sources} to {resampling.targets}", named, "use sizes of at least 1")
