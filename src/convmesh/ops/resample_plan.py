"""Planning a resampling: the taps of each dimension, and this rank's part of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from .. import _torch
from ..geometry import Interval, Taps, taps
from ..sharding.cache import planned
from ..sharding.errors import refuse
from ..sharding.layout import Layout
from .numbers import Numbers
from .reach import ReachPlan, plan_targets


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
class Weighing:
    """Along one dimension: this rank's targets are the sum over `taps` of weighted indices of its block."""

    dim: int
    growth: float
    taps: tuple[tuple[Numbers, Numbers | None], ...]  # no weights: all are 1
    unread: Numbers  # targets that nothing goes into

    @staticmethod
    def of(dim: int, growth: float, all_taps: Taps, targets: Interval, block: Interval) -> Weighing:
        mine = all_taps.of[targets.start : targets.stop]
        rows = []
        for number in range(max((len(some) for some in mine), default=0)):
            # A target with fewer taps than others repeats its last, and weighs it with nothing.
            picked = [some[min(number, len(some) - 1)] if some else (block.start, 0.0) for some in mine]
            weights = [tap[1] if number < len(some) else 0.0 for tap, some in zip(picked, mine, strict=True)]
            plain = all(weight == 1 for weight, some in zip(weights, mine, strict=True) if some)
            rows.append((Numbers([tap[0] - block.start for tap in picked]), None if plain else Numbers(weights)))
        return Weighing(dim, growth, tuple(rows), Numbers([at for at, some in enumerate(mine) if not some]))

    def apply(self, x: torch.Tensor) -> torch.Tensor:
        total: torch.Tensor | None = None
        for index, weights in self.taps:
            part = x.index_select(self.dim, index.on(x.device))
            if weights is None:
                total = part if total is None else total.add_(part)
            elif total is None:
                total = part.mul_(weights.along(self.dim, part))
            else:
                total.addcmul_(part, weights.along(self.dim, part))
        if total is None:
            shape = [*x.shape]
            shape[self.dim] = len(self.unread.values)
            return x.new_zeros(shape)
        return total.index_fill_(self.dim, self.unread.on(x.device), 0) if self.unread.values else total


@dataclass(frozen=True)
class ResamplePlan:
    layouts: ReachPlan
    weighings: tuple[Weighing, ...]


@planned
def plan_resample(operator: str, input_spec: _torch.Spec, resampling: Resampling) -> ResamplePlan:
    given = Layout.of(input_spec)
    _check(operator, given, resampling)
    mapped = dict(enumerate(_all_taps(given, resampling), 2))
    ends = (resampling.targets, resampling.sources) if resampling.backward else (resampling.sources, resampling.targets)
    shape = (*given.shape[:2], *ends[1])
    layouts = plan_targets(given, shape, {dim: some.runs for dim, some in mapped.items()}, True)
    reach = layouts.reach
    if reach is None or not reach.dims:
        return ResamplePlan(layouts, ())
    if not given.dtype.is_floating_point and "nearest" not in resampling.mode:
        raise refuse(operator, f"dtype {given.dtype} along sharded dimensions", (("input", given),),
                     "cast to a floating point dtype first")  # fmt: skip
    weighings = []
    for dim, some in mapped.items():
        targets, block = reach.side(reach.targets, dim, shape[dim]), reach.side(reach.read, dim, given.shape[dim])
        if shape[dim] != given.shape[dim] or not some.trivial:
            weighings.append(Weighing.of(dim, shape[dim] / given.shape[dim], some, targets, block))
        elif dim in reach.dims:
            assert targets == block or not targets, "nothing is resampled along this dimension"
    # What shrinks goes first, so that less is left for the others.
    return ResamplePlan(layouts, tuple(sorted(weighings, key=lambda weighing: weighing.growth)))


def _all_taps(given: Layout, resampling: Resampling) -> list[Taps]:
    double = given.dtype == torch.float64
    if "nearest" in resampling.mode:
        double = double and _nearest_is_double(given, resampling)
    made = []
    for source, target, scale in zip(resampling.sources, resampling.targets, resampling.scales, strict=True):
        along = taps(resampling.mode, source, target, resampling.align_corners, scale, double)
        made.append(along.transposed(source) if resampling.backward else along)
    return made


def _nearest_is_double(given: Layout, resampling: Resampling) -> bool:
    """Of torch's kernels for nearest neighbours, some on CPU compute in float64 for float64, and only forward."""
    if resampling.backward or given.mesh.device_type != "cpu":
        return False
    if given.memory_format != torch.contiguous_format and given.shape[1] > 3:
        return False
    return len(resampling.targets) != 2 or sum(resampling.targets) > 128


def _check(operator: str, given: Layout, resampling: Resampling) -> None:
    spatial = len(resampling.targets)
    named: Sequence[tuple[str, object]] = (("input", given), ("arguments", resampling))
    expected = resampling.targets if resampling.backward else resampling.sources
    if len(given.shape) != spatial + 2 or given.shape[2:] != expected:
        raise refuse(operator, f"an input of shape {given.shape}", named, f"give (N, C) and {spatial} sizes")
    if min(*resampling.sources, *resampling.targets) < 1:
        raise refuse(operator, f"sizes {resampling.sources} to {resampling.targets}", named, "use sizes of at least 1")
