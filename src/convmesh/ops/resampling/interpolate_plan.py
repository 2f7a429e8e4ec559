"""Planning an interpolation: the taps of each dimension, and those of this rank's targets."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache

import torch

from ... import _torch
from ...geometry import Box, Interval, Taps, TransposedTaps, taps
from ...kernels.resampling import cubic_copies_equal_sizes, nearest_is_general, nearest_rounds_scales
from ...sharding.errors import Unfit
from ...sharding.layout import Layout
from .._core.tile_plan import TiledPlan, check_memory, plan_targets
from .._core.tiles import LARGEST_BORDER, Tiling
from .gathered import Along, Gathered, along_block
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


@dataclass(frozen=True, eq=False)
class ResamplePlan(TiledPlan):
    """Either all of a rank's targets are weighted sums, or torch's own operator is right for them: on the local tensor
    for the `inner` ones, and on a block with its halos for all of them."""

    inner: Box | None
    gathered: Gathered | None
    sums_of: Callable[[Box], tuple[Box, WeightedSums]]  # what a box of targets reads, and how that is summed
    sums: bool  # whether it is by these that targets are made where nothing is sharded


def plan_resample(given: Layout, resampling: Resampling) -> ResamplePlan:
    _check(given, resampling)
    shape = (*given.shape[:2], *(resampling.sources if resampling.backward else resampling.targets))
    check_memory(given, shape)
    mapped = dict(enumerate(_all_taps(given, resampling), 2))
    layouts = plan_targets(given, shape, mapped, True)
    tiling = layouts.tiling
    kernel = _takes_symbols(resampling) or not _torch.has_symbols(given.shape)
    sums = _Sums(layouts, mapped)
    if tiling is None or (kernel and not tiling.dims):
        return ResamplePlan(*layouts.fields, None, None, sums, False)
    if not given.dtype.is_floating_point and "nearest" not in resampling.mode:
        raise Unfit(f"dtype {given.dtype} is not supported along sharded dimensions", "cast to floating point first")
    kernel = kernel and _knows_size(layouts, resampling)
    inner = _inner(layouts, tiling, mapped, resampling) if kernel else None
    gathered = _gathered(layouts, tiling, mapped, resampling) if kernel else None
    return ResamplePlan(*layouts.fields, inner, gathered, sums, True)


class _Sums:
    """How boxes of this rank's targets are summed of blocks of sources, found once for each."""

    def __init__(self, layouts: TiledPlan, mapped: Mapping[int, AnyTaps]):
        self._given, self._made, self._tiling = layouts.operands[0].shape, layouts.computed.shape, layouts.tiling
        self._mapped, self._along = mapped, cache(self._find)
        # What shrinks goes first, so that less is left for the others.
        self._order = sorted(mapped, key=lambda dim: self._made[dim] / self._given[dim])
        self._found: dict[Box, tuple[Box, WeightedSums]] = {}

    def __call__(self, targets: Box) -> tuple[Box, WeightedSums]:
        found = self._found.get(targets)
        if found is None:
            assert self._tiling is not None
            read, side = self._tiling.reads(targets), self._tiling.side
            sides = ((d, side(targets, d, self._made[d]), side(read, d, self._given[d]).start) for d in self._order)
            made = tuple(one for one in (self._along(*each) for each in sides) if one is not None)
            found = self._found[targets] = read, made
        return found

    def _find(self, dim: int, targets: Interval, start: int) -> WeightedSum | None:
        """How these targets are summed of a block from `start` on; None where they are the block itself."""
        own = self._mapped[dim].of(targets)
        if self._made[dim] == self._given[dim] and all(some == ((at, 1.0),) for at, some in enumerate(own, start)):
            return None
        return WeightedSum.of(dim, own, start)


def _takes_symbols(resampling: Resampling) -> bool:
    """Whether torch's kernel takes batch sizes that are symbols of a compiler."""
    return not (resampling.backward and resampling.mode in ("linear", "cubic"))


def _knows_size(layouts: TiledPlan, resampling: Resampling) -> bool:
    """Whether torch's operator does with a part what it does with the full tensor."""
    if resampling.mode.endswith("_aa"):  # torch's antialiasing mistakes the layout of results that are 1 wide
        return False
    sizes = layouts.operands[0].local_shape[2:], layouts.computed.local_shape[2:]
    return 0 not in sizes[0] and 0 not in sizes[1] and not _copies(layouts.computed, resampling, *sizes)


def _inner(layouts: TiledPlan, tiling: Tiling, mapped: Mapping[int, AnyTaps], resampling: Resampling) -> Box | None:
    """The targets for which torch's operator on the local tensor is right; None if these are not nearly all."""
    sides, double = [], layouts.computed.dtype == torch.float64
    for dim, sources, targets in zip(tiling.dims, tiling.sources, tiling.targets, strict=True):
        right = _right(mapped[dim], resampling, dim, Along(sources, targets), targets, double, sources)
        inside = Interval(*_longest(right)).shift(targets.start)
        if len(inside) < (1 - LARGEST_BORDER) * len(targets):
            return None
        sides.append(inside)
    return tuple(sides)


def _gathered(
    layouts: TiledPlan, tiling: Tiling, mapped: Mapping[int, AnyTaps], resampling: Resampling
) -> Gathered | None:
    """A block of sources of which torch's operator makes all of this rank's targets; None where there is none."""
    sides, double = [], layouts.computed.dtype == torch.float64
    given, shape = list(layouts.operands[0].local_shape), list(layouts.computed.local_shape)
    for dim, read, targets in zip(tiling.dims, tiling.source_halos.needed, tiling.targets, strict=True):
        side = along_block(read, targets, layouts.operands[0].shape[dim], layouts.computed.shape[dim])
        if side is None or not all(_right(mapped[dim], resampling, dim, side, targets, double, read)):
            return None
        sides.append(side)
        given[dim], shape[dim] = side.block.size, side.produced.size
    if _copies(layouts.computed, resampling, given[2:], shape[2:]):
        return None
    return Gathered.of(tiling, sides, given, shape)


def _right(
    of_all: AnyTaps, resampling: Resampling, dim: int, side: Along, wanted: Interval, double: bool, read: Interval
) -> list[bool]:
    """By wanted target: whether the operator has the same taps for it if it knows of a block only. What of that is not
    `read` is zeros, of which it may take nothing."""
    sizes = side.block.size, side.produced.size
    ends = (sizes[1], sizes[0]) if resampling.backward else sizes
    theirs, here = of_all.of(wanted), wanted.shift(-side.produced.start)
    right = [True] * len(wanted)
    # Of nearest neighbours it depends on the sizes by which kernel torch looks for them.
    nearest = {"nearest": ("nearest", "nearest_scaled"), "nearest_exact": ("nearest_exact",)}
    kernels = [(mode, precise) for mode in nearest.get(resampling.mode, ()) for precise in (False, True)]
    for mode, precise in kernels or [(resampling.mode, double)]:
        alone = _directed(mode, *ends, resampling, dim - 2, precise).of(here)
        for at, (mine, other) in enumerate(zip(alone, theirs, strict=True)):
            moved = ((source + side.block.start, weight) for source, weight in mine)
            right[at] &= tuple((source, weight) for source, weight in moved if weight or source in read) == other
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


def _check(given: Layout, resampling: Resampling) -> None:
    spatial = len(resampling.targets)
    expected = resampling.targets if resampling.backward else resampling.sources
    if len(given.shape) != spatial + 2 or given.shape[2:] != expected:
        raise Unfit(f"an input of shape {given.shape}", f"give (N, C) and {spatial} sizes")
    if min(*resampling.sources, *resampling.targets) < 1:
        raise Unfit(f"sizes {resampling.sources} to {resampling.targets}", "use sizes of at least 1")
