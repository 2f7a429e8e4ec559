"""Planning an adaptive pooling: each rank pools the parts of windows that it owns, and the owners of the targets
put them together. So a few numbers travel, however large a window is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

from ... import _torch
from ...geometry import Bundle, HaloPlan, Interval, Runs, Slots, adaptive_bundles
from ...sharding.errors import refuse
from ...sharding.layout import Layout
from ...sharding.plan_cache import planned
from .._core.cached_tensors import Numbers
from .._core.reach import Reach, ReachPlan, ask_for_memory, plan_sources, plan_targets

PARTS = "for each window that lies on several ranks, one number a channel and rank"


@dataclass(frozen=True)
class Side:
    """One spatial dimension: this rank's sources, the targets that it has something to say about, and their windows."""

    dim: int
    sources: Interval
    touched: Interval
    source_size: int
    target_size: int

    @staticmethod
    def of(dim: int, source_size: int, target_size: int, reach: Reach) -> Side:
        sources = reach.side(reach.sources, dim, source_size)
        touched = reach.side(reach.touched, dim, target_size)
        return Side(dim, sources, touched, source_size, target_size)

    @cached_property
    def slots(self) -> Slots:
        return Slots.of(Runs.adaptive(self.source_size, self.target_size), self.sources, self.touched)

    @cached_property
    def positions(self) -> Numbers:
        return Numbers(self.slots.positions)

    @cached_property
    def bundles(self) -> tuple[Bundle, ...]:
        return adaptive_bundles(self.source_size, self.target_size, self.sources, self.touched)


@dataclass(frozen=True)
class AdaptivePlan:
    layouts: ReachPlan
    sides: tuple[Side, ...]  # none on a rank outside of the mesh
    target_sizes: tuple[int, ...]

    @property
    def first(self) -> int:
        return len(self.layouts.computed.shape) - len(self.target_sizes)


@planned
def plan_adaptive(operator: str, input_spec: _torch.Spec, sizes: tuple[int, ...], linear: bool) -> AdaptivePlan:
    source = Layout.of(input_spec)
    _check(operator, (("input", source),), source, sizes)
    shape = (*source.shape[: len(source.shape) - len(sizes)], *sizes)
    ask_for_memory(source, shape)
    layouts = plan_targets(source, shape, _readings(source, sizes), linear)
    return AdaptivePlan(layouts, _sides(layouts.reach, source, sizes), sizes)


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
    layouts = plan_sources(operator, named, source, _readings(source, sizes))
    return AdaptivePlan(layouts, _sides(layouts.reach, source, sizes), sizes)


def _readings(source: Layout, sizes: tuple[int, ...]) -> dict[int, Runs]:
    first = len(source.shape) - len(sizes)
    return {first + axis: Runs.adaptive(source.shape[first + axis], size) for axis, size in enumerate(sizes)}


def _sides(reach: Reach | None, source: Layout, sizes: tuple[int, ...]) -> tuple[Side, ...]:
    if reach is None:
        return ()
    first = len(source.shape) - len(sizes)
    return tuple(Side.of(first + axis, source.shape[first + axis], size, reach) for axis, size in enumerate(sizes))


def _check(operator: str, tensors: Sequence[tuple[str, Layout]], source: Layout, sizes: tuple[int, ...]) -> None:
    spatial = len(sizes)
    if len(source.shape) not in (spatial + 1, spatial + 2):
        raise refuse(operator, f"an input of {len(source.shape)} dimensions", tensors,
                     f"give {spatial} spatial dimensions after channels, or after batch and channels")  # fmt: skip
    if min(sizes) < 0 or min(source.shape[-spatial:]) < 1:
        raise refuse(operator, f"an output of size {sizes} of an input of size {source.shape[-spatial:]}", tensors,
                     "use an input that has spatial indices, and a size that is not negative")  # fmt: skip


def contributions(plan: HaloPlan) -> tuple[HaloPlan, list[int]]:
    """What the ranks have for targets, numbered one rank after the other, all of it needed by who owns the target.

    `plan` is of targets: owned, and touched by each rank. Also returns the number of each rank's first contribution.
    """
    touched = [parts[0] for parts in plan.needed]
    starts = [0]
    for part in touched:
        starts.append(starts[-1] + len(part))
    needed = tuple(
        tuple(
            common.shift(start - part.start)
            for part, start in zip(touched, starts, strict=False)
            if (common := part & own)
        )
        for own in plan.owned
    )
    owned = tuple(Interval(a, b) for a, b in pairwise(starts))
    return HaloPlan(starts[-1], owned, needed), starts
