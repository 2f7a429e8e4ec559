"""Planning a resampling: the taps of each dimension, and this rank's part of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from ... import _torch
from ...geometry import Box, Interval, Taps, slabs, taps
from ...kernels.resampling import cubic_copies_equal_sizes, nearest_is_general, nearest_rounds_scales
from ...sharding.errors import refuse
from ...sharding.layout import Layout
from ...sharding.plan_cache import planned
from .._core.reach import ReachPlan, ask_for_memory, plan_targets
from .._core.tiles import LARGEST_BORDER
from .weighted_sum import Weighing, Weighings


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
class OwnPart:
    """Where torch's own operator, run on what a rank has, is right: in all but a border of its targets."""

    targets: Box
    inner: Box
    strips: dict[Box, tuple[Box, Weighings]]  # of the border: what they read, and how it is weighed


@dataclass(frozen=True)
class ResamplePlan:
    layouts: ReachPlan
    weighings: Weighings
    own: OwnPart | None  # None where too little would be right: then all is weighed


@planned
def plan_resample(operator: str, input_spec: _torch.Spec, resampling: Resampling) -> ResamplePlan:
    given = Layout.of(input_spec)
    _check(operator, given, resampling)
    shape = (*given.shape[:2], *(resampling.sources if resampling.backward else resampling.targets))
    ask_for_memory(given, shape)
    mapped = dict(enumerate(_all_taps(given, resampling), 2))
    layouts = plan_targets(given, shape, {dim: some.runs for dim, some in mapped.items()}, True)
    reach = layouts.reach
    if reach is None or not reach.dims:
        return ResamplePlan(layouts, (), None)
    if not given.dtype.is_floating_point and "nearest" not in resampling.mode:
        raise refuse(operator, f"dtype {given.dtype} along sharded dimensions", (("input", given),),
                     "cast to a floating point dtype first")  # fmt: skip

    def weighings(targets: Box) -> tuple[Box, Weighings]:
        """What a box of targets reads along the cut dimensions, and how it is weighed."""
        read = tuple(mapped[dim].runs.reads(side) for dim, side in zip(reach.dims, targets, strict=True))
        made = []
        for dim, some in mapped.items():
            mine, block = reach.side(targets, dim, shape[dim]), reach.side(read, dim, given.shape[dim])
            if shape[dim] != given.shape[dim] or not some.trivial:
                made.append(Weighing.of(dim, shape[dim] / given.shape[dim], some, mine, block))
            elif dim in reach.dims:
                assert mine == block or not mine, "nothing is resampled along this dimension"
        # What shrinks goes first, so that less is left for the others.
        return read, tuple(sorted(made, key=lambda weighing: weighing.growth))

    inner = _inner(layouts, mapped, resampling)
    if inner is None:
        return ResamplePlan(layouts, weighings(reach.targets)[1], None)
    strips = {strip: weighings(strip) for side in slabs(reach.targets, inner) for strip in side}
    return ResamplePlan(layouts, (), OwnPart(reach.targets, inner, strips))


def _inner(layouts: ReachPlan, mapped: Mapping[int, Taps], resampling: Resampling) -> Box | None:
    """The targets that come out right if a rank resamples what it has; None if these are not nearly all."""
    reach, sides = layouts.reach, []
    assert reach is not None
    if resampling.mode.endswith("_aa"):  # torch's antialiasing mistakes the layout of results that are 1 wide
        return None
    if _copies(layouts.computed, resampling, layouts.operands[0].local_shape[2:], layouts.computed.local_shape[2:]):
        return None
    for dim, sources, targets in zip(reach.dims, reach.sources, reach.targets, strict=True):
        if not sources or not targets:
            return None
        right = _right(mapped[dim], resampling, dim, sources, targets, layouts.computed.dtype == torch.float64)
        inside = Interval(*_longest(right)).shift(targets.start)
        if len(inside) < (1 - LARGEST_BORDER) * len(targets):
            return None
        sides.append(inside)
    return tuple(sides)


def _right(
    whole: Taps, resampling: Resampling, dim: int, sources: Interval, targets: Interval, double: bool
) -> list[bool]:
    """By target: whether the operator has the same taps for it if it knows of these sources only."""
    ends = (len(targets), len(sources)) if resampling.backward else (len(sources), len(targets))
    wanted = whole.of[targets.start : targets.stop]
    right = [True] * len(targets)
    # Of nearest neighbours it depends on the sizes by which kernel torch looks for them.
    nearest = {"nearest": ("nearest", "nearest_scaled"), "nearest_exact": ("nearest_exact",)}
    kernels = [(mode, precise) for mode in nearest.get(resampling.mode, ()) for precise in (False, True)]
    for mode, precise in kernels or [(resampling.mode, double)]:
        alone = taps(mode, *ends, resampling.align_corners, resampling.scales[dim - 2], precise)
        alone = alone.transposed(ends[0]) if resampling.backward else alone
        for at, (mine, theirs) in enumerate(zip(alone.of, wanted, strict=True)):
            right[at] &= tuple((source + sources.start, weight) for source, weight in mine) == theirs
    return right


def _longest(right: Sequence[bool]) -> tuple[int, int]:
    """The longest run of what is true, from its first to behind its last."""
    best = (0, 0)
    start = 0
    for at, true in enumerate((*right, False)):
        if not true:
            best = max(best, (start, at), key=lambda run: run[1] - run[0])
            start = at + 1
    return best


def _all_taps(given: Layout, resampling: Resampling) -> list[Taps]:
    mode, double = resampling.mode, given.dtype == torch.float64
    if "nearest" in mode:
        general = _nearest_is_general(given, resampling)
        double = double and general
        if mode == "nearest" and nearest_rounds_scales(given.mesh.device_type, general):
            mode = "nearest_scaled"
    elif _copies(given, resampling, resampling.sources, resampling.targets):
        mode = "linear"  # of which equal sizes are a copy
    made = []
    for source, target, scale in zip(resampling.sources, resampling.targets, resampling.scales, strict=True):
        along = taps(mode, source, target, resampling.align_corners, scale, double)
        made.append(along.transposed(source) if resampling.backward else along)
    return made


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
