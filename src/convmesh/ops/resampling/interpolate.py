"""Interpolation in all modes, and its gradients: weighted sums of indices, one dimension after another.

Interpolation by area is adaptive pooling.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from ... import _torch
from ...comm import Held
from ...geometry import Box
from ...sharding.call import Call, Moved
from ...sharding.layout import Layout
from ...sharding.plan_rule import plan_rule
from ...sharding.registry import Behaviour, keep_whole, rule
from .._core.tiles import recompute_border
from .gathered import FEW_ELEMENTS
from .interpolate_plan import ResamplePlan, Resampling, plan_resample
from .weighted_sum import WeightedSums

aten = torch.ops.aten

# Mode of each operator, its name, and for how many spatial dimensions there is one.
MODES = {
    "nearest": ("upsample_nearest{}d", (1, 2, 3)),
    "nearest_exact": ("_upsample_nearest_exact{}d", (1, 2, 3)),
    "linear": ("upsample_{}d", ("linear1", "bilinear2", "trilinear3")),
    "cubic": ("upsample_bicubic{}d", (2,)),
    "linear_aa": ("_upsample_bilinear{}d_aa", (2,)),
    "cubic_aa": ("_upsample_bicubic{}d_aa", (2,)),
    "lanczos_aa": ("_upsample_lanczos{}d_aa", (2,)),
}
# Not every torch release has all of them.
PACKETS = {
    name: mode
    for mode, (template, dimensions) in MODES.items()
    for name in (template.format(d) for d in dimensions)
    if hasattr(aten, name)
}
FORWARD = {getattr(aten, name).default: mode for name, mode in PACKETS.items()}
BACKWARD = {getattr(aten, f"{name}_backward").default: mode for name, mode in PACKETS.items()}

NAMED = {getattr(aten, name).vec: getattr(aten, name).default for name in PACKETS}

keep_whole(*FORWARD)

STAYS = "batch, channels, space, Partial(sum)"


@plan_rule(*FORWARD, behaviour=Behaviour(STAYS, "halo of the input"))
def resample(operator: _torch.Operator, input: Layout, sizes: Sequence[int], *rest: Any) -> Call:
    return _call(operator, input, _resampling(FORWARD[operator], input.shape[2:], sizes, rest, backward=False), rest)


@rule(*NAMED, behaviour=Behaviour(STAYS, "halo of the input"))
def resample_by_factors(operator: _torch.Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> DTensor:
    """Reaches DTensor undecomposed in inference mode. torch's own decomposition indexes with plain tensors."""
    input, sizes, *align_corners, factors = _torch.arguments(operator, args, kwargs)
    if sizes is None:
        sizes = [int(size * factor) for size, factor in zip(input.shape[2:], factors, strict=True)]
    result: DTensor = NAMED[operator](input, sizes, *align_corners, *(factors or [None] * len(sizes)))
    return result


keep_whole(*NAMED, made_of=resample_by_factors)


@plan_rule(*BACKWARD, behaviour=Behaviour(STAYS, "halo of the gradient"))
def resample_backward(
    operator: _torch.Operator, gradient: Layout, sizes: Sequence[int], shape: Sequence[int], *rest: Any
) -> Call:
    return _call(operator, gradient, _resampling(BACKWARD[operator], shape[2:], sizes, rest, backward=True), rest)


def _resampling(mode: str, sources: Any, targets: Any, rest: Sequence[Any], backward: bool) -> Resampling:
    scales = rest if "nearest" in mode else rest[1:]
    return Resampling(
        mode,
        tuple(map(int, sources)),
        tuple(map(int, targets)),
        bool(rest[0]) if "nearest" not in mode else False,
        tuple(None if scale is None else float(scale) for scale in scales),
        backward,
    )


def _call(operator: _torch.Operator, given: Layout, resampling: Resampling, rest: Sequence[Any]) -> Call:
    plan = plan_resample(given, resampling)
    return Call(plan.operands, Moved(plan.computed, plan.wanted), _Resample(operator, plan, resampling, rest))


class _Resample:
    """By torch's operator, on a small tile together with its halos, or on the tile with its border computed anew; by
    weighted sums where it would take other weights than on the full tensor."""

    def __init__(self, operator: _torch.Operator, plan: ResamplePlan, resampling: Resampling, rest: Sequence[Any]):
        self._operator, self._plan, self._rest, self._backward = operator, plan, rest, resampling.backward
        self._shape = plan.computed.local_shape
        self._own = self._told(plan.operands[0].local_shape, self._shape)
        self._of_block = [] if plan.gathered is None else self._told(plan.gathered.given, plan.gathered.shape)

    def __call__(self, x: torch.Tensor, *_: object) -> torch.Tensor:
        plan, tiling = self._plan, self._plan.tiling
        assert tiling is not None, "nothing is computed outside of the mesh"
        if not tiling.dims and not plan.sums and 0 not in self._shape:
            return self._by_operator(x, self._own)
        # A compiled exchange is awaited where it starts, and so there is nothing to do meanwhile, whatever the size.
        if plan.gathered is not None and (type(x) is not torch.Tensor or x.numel() <= FEW_ELEMENTS):
            return plan.gathered.of_own(self._by_operator(plan.gathered.block(x), self._of_block))
        fetch = tiling.fetch_sources(x)
        if 0 in self._shape:
            return fetch.tie(x.new_empty(self._shape))
        if plan.inner is not None:
            y = recompute_border(self._by_operator(x, self._own), fetch, tiling.targets, plan.inner, self._strip)
        else:
            y = self._strip(fetch.complete(), tiling.targets).to(x.dtype)
        return fetch.tie(y)

    def _told(self, given: Sequence[int], made: Sequence[int]) -> list[list[int]]:
        """The operator is told the size of its result, and going backward that of its operand too."""
        return [list(given[2:]), list(made)] if self._backward else [list(made[2:])]

    def _by_operator(self, x: torch.Tensor, sizes: list[list[int]]) -> torch.Tensor:
        y: torch.Tensor = self._operator(x, *sizes, *self._rest)
        return y

    def _strip(self, held: Held, box: Box) -> torch.Tensor:
        read, sums = self._plan.sums_of(box)
        return _weighted(held.read(read), sums)


def _weighted(x: torch.Tensor, sums: WeightedSums) -> torch.Tensor:
    """In the precision in which torch computes half precision."""
    half = x.dtype in (torch.float16, torch.bfloat16)
    x = x.float() if half else x
    for along in sums:
        x = along.apply(x)
    return x
