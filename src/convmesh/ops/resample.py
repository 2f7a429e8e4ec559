"""Resampling in all modes of `interpolate`, and its gradients: weighted runs of indices, one dimension after another.

Interpolation by area is adaptive pooling.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor

from .. import _torch
from ..sharding.dispatch import check_placed, move
from ..sharding.registry import Behaviour, keep_whole, rule
from .pool import name_of
from .resample_plan import Resampling, plan_resample

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

keep_whole(*FORWARD, *NAMED)

STAYS = "batch, channels, space, pending sums"


@rule(*FORWARD, behaviour=Behaviour("resampling", STAYS, "halo of the input"))
def resample(operator: _torch.Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> DTensor:
    input, sizes, *rest = _torch.arguments(operator, args, kwargs)
    check_placed(name_of(operator), (("input", input),))
    spec = _torch.spec_of(input)
    resampling = _resampling(FORWARD[operator], tuple(input.shape[2:]), sizes, rest, backward=False)
    return _run(operator, input, spec, resampling, (list(resampling.targets), *rest))


@rule(*NAMED, behaviour=Behaviour("resampling", STAYS, "as the operator that it is made of"))
def resample_by_factors(operator: _torch.Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> DTensor:
    """Reaches DTensor whole in inference mode. torch's own way to take it apart indexes with plain tensors."""
    input, sizes, *align_corners, factors = _torch.arguments(operator, args, kwargs)
    if sizes is None:
        sizes = [int(size * factor) for size, factor in zip(input.shape[2:], factors, strict=True)]
    result: DTensor = NAMED[operator](input, sizes, *align_corners, *(factors or [None] * len(sizes)))
    return result


@rule(*BACKWARD, behaviour=Behaviour("resampling", STAYS, "halo of the gradient"))
def resample_backward(operator: _torch.Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> DTensor:
    gradient, sizes, shape, *rest = _torch.arguments(operator, args, kwargs)
    check_placed(name_of(operator), (("grad_output", gradient),))
    spec = _torch.spec_of(gradient)
    resampling = _resampling(BACKWARD[operator], tuple(shape[2:]), sizes, rest, backward=True)
    local_shape = [*_torch.local_of(gradient).shape[:2], *resampling.sources]
    return _run(operator, gradient, spec, resampling, (list(resampling.targets), local_shape, *rest))


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
    operator: _torch.Operator, tensor: DTensor, spec: _torch.Spec, resampling: Resampling, stock: tuple[Any, ...]
) -> DTensor:
    plan = plan_resample(name_of(operator), spec, resampling)
    layouts = plan.layouts
    if layouts.reach is None:
        return layouts.outside(tensor)
    x = move(tensor, layouts.operands[0])
    shape = layouts.computed.local_shape
    empty = 0 in shape
    if not layouts.reach.dims and not empty:
        return layouts.finish(operator(x, *stock))
    fetch = layouts.reach.fetch(x)
    if empty:
        return layouts.finish(fetch.tie(x.new_empty(shape)))
    y = fetch.held.read(layouts.reach.read)
    half = y.dtype in (torch.float16, torch.bfloat16)
    y = y.float() if half else y
    for weighing in plan.weighings:
        y = weighing.apply(y)
    return layouts.finish(fetch.tie(y.to(x.dtype)))
