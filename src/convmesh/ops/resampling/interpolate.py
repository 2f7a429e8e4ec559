"""Interpolation in all modes, and its gradients: weighted sums of indices, one dimension after another.

Interpolation by area is adaptive pooling.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor

from ... import _torch
from ...comm import Held
from ...geometry import Box
from ...sharding.redistribute import check_placed, move
from ...sharding.registry import Behaviour, keep_whole, rule
from .._core.tiles import patch
from ..pooling.window import name_of
from .interpolate_plan import Resampling, plan_resample
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


@rule(*FORWARD, behaviour=Behaviour(STAYS, "halo of the input"))
def resample(operator: _torch.Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> DTensor:
    input, sizes, *rest = _torch.arguments(operator, args, kwargs)
    check_placed(name_of(operator), (("input", input),))
    if FORWARD[operator] in ("linear", "cubic"):
        _torch.settle(input)  # torch's kernels of their gradients take no symbols
    spec = _torch.spec_of(input)
    resampling = _resampling(FORWARD[operator], tuple(input.shape[2:]), sizes, rest, backward=False)
    return _run(operator, input, spec, resampling, rest)


@rule(*NAMED, behaviour=Behaviour(STAYS, "as the operator that it is made of"))
def resample_by_factors(operator: _torch.Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> DTensor:
    """Reaches DTensor undecomposed in inference mode. torch's own decomposition indexes with plain tensors."""
    input, sizes, *align_corners, factors = _torch.arguments(operator, args, kwargs)
    if sizes is None:
        sizes = [int(size * factor) for size, factor in zip(input.shape[2:], factors, strict=True)]
    result: DTensor = NAMED[operator](input, sizes, *align_corners, *(factors or [None] * len(sizes)))
    return result


keep_whole(*NAMED, made_of=resample_by_factors)


@rule(*BACKWARD, behaviour=Behaviour(STAYS, "halo of the gradient"))
def resample_backward(operator: _torch.Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> DTensor:
    gradient, sizes, shape, *rest = _torch.arguments(operator, args, kwargs)
    check_placed(name_of(operator), (("grad_output", gradient),))
    spec = _torch.spec_of(gradient)
    resampling = _resampling(BACKWARD[operator], tuple(shape[2:]), sizes, rest, backward=True)
    return _run(operator, gradient, spec, resampling, rest)


def _resampling(mode: str, sources: Any, targets: Any, rest: list[Any], backward: bool) -> Resampling:
    scales = rest if "nearest" in mode else rest[1:]
    return Resampling(
        mode,
        tuple(map(int, sources)),
        tuple(map(int, targets)),
        bool(rest[0]) if "nearest" not in mode else False,
        tuple(None if scale is None else float(scale) for scale in scales),
        backward,
    )


def _run(
    operator: _torch.Operator, tensor: DTensor, spec: _torch.Spec, resampling: Resampling, rest: list[Any]
) -> DTensor:
    plan = plan_resample(name_of(operator), spec, resampling)
    tiling = plan.tiling
    if tiling is None:
        return plan.outside(tensor)
    x = move(tensor, plan.operands[0])
    shape = plan.computed.local_shape
    # Going forward torch's operator is told the size of its result, and going backward that of its operand too.
    ends = [list(x.shape[2:]), list(shape)] if resampling.backward else [list(shape[2:])]
    if not tiling.dims and 0 not in shape:
        return plan.finish(operator(x, *ends, *rest))
    fetch = tiling.fetch_sources(x)
    if 0 in shape:
        return plan.finish(fetch.tie(x.new_empty(shape)))

    def strip(held: Held, box: Box) -> torch.Tensor:
        read, sums = plan.sums[box]
        return _weighted(held.read(read), sums)

    if plan.inner is not None:
        y = patch(operator(x, *ends, *rest), fetch, tiling.targets, plan.inner, strip)
    else:
        y = strip(fetch.complete(), tiling.targets).to(x.dtype)
    return plan.finish(fetch.tie(y))


def _weighted(x: torch.Tensor, sums: WeightedSums) -> torch.Tensor:
    """In the precision in which torch computes half precision."""
    half = x.dtype in (torch.float16, torch.bfloat16)
    x = x.float() if half else x
    for along in sums:
        x = along.apply(x)
    return x
