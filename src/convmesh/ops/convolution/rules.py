"""Convolution and its gradient on DTensors: layout of the arguments -> plan -> exchange -> local compute -> wrap."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor

from ... import _torch
from ...comm import Held
from ...geometry import Box
from ...sharding.call import Call, Moved
from ...sharding.layout import Layout
from ...sharding.plan_rule import plan_rule
from ...sharding.registry import Behaviour, composite, made_of_others
from .._core.tiles import recompute_border
from . import halo_taps
from .backward import gradients
from .local import LocalConvolution
from .plan import plan_backward, plan_forward

aten = torch.ops.aten


made_of_others(
    *(getattr(getattr(aten, f"conv{d}d"), overload) for d in (1, 2, 3) for overload in ("default", "padding")),
    aten.conv_transpose1d.default,
    aten.conv_transpose2d.input,
    aten.conv_transpose3d.input,
)


FORWARD = Behaviour("batch, channels, groups, space, Partial(sum)", "halo of the input")
BACKWARD = Behaviour("batch, channels, groups, space, Partial(sum)", "halo of input or output gradient")


@plan_rule(aten.convolution.default, behaviour=FORWARD)
def convolution(operator: _torch.Operator, input: Layout, weight: Layout, bias: Layout | None, *geometry: Any) -> Call:
    plan = plan_forward(input, weight, bias, *geometry)
    adds = plan.output.adds_once  # the bias, which all ranks redistribute: a Partial(sum) adds up what they have
    return Call(plan.operands, plan.output, lambda x, w, b, *_: _forward(plan.local, x, w, b if adds else None))


def _forward(local: LocalConvolution | None, x: torch.Tensor, w: torch.Tensor, b: torch.Tensor | None) -> torch.Tensor:
    """[N C fine] [O C kernel] [O] -> [N O coarse], or from coarse to fine if it is transposed."""
    assert local is not None, "nothing is computed outside of the mesh"
    tiling = local.tiling
    if not tiling.dims:
        return local.own(x, w, b)
    gathered = local.gathered(x, fine=not local.conv.transposed) if w.numel() else None
    if gathered is not None:
        return gathered.output(x, w, b)

    def part(held: Held, box: Box) -> torch.Tensor:
        return local.part(held, box, w, b, to_fine=local.conv.transposed)

    fetch = tiling.fetch_targets(x) if local.conv.transposed else tiling.fetch_sources(x)
    produced, inner = tiling.produced_by(local.conv.transposed)
    if tiling.reaches_far:
        wide_x, wide_w, wide_b = halo_taps.widened(x, w, b)
        own = halo_taps.add_output(local, local.own(wide_x, wide_w, wide_b), fetch, wide_w)
        return fetch.tie(own.to(x.dtype))
    if not tiling.computes_own:
        return fetch.tie(part(fetch.complete(), produced))
    own = local.own(x, w, b)
    if halo_taps.pays(w):
        return fetch.tie(halo_taps.add_output(local, own, fetch, w))
    return fetch.tie(recompute_border(own, fetch, produced, inner, part))


@plan_rule(aten.convolution_backward.default, behaviour=BACKWARD)
def convolution_backward(
    operator: _torch.Operator, gradient: Layout, input: Layout, weight: Layout, bias_sizes: Any, *numbers: Any
) -> Call:
    plan = plan_backward(gradient, input, weight, *numbers)
    pairs = zip(plan.computed, plan.wanted, strict=True)
    results = [None if one is None or other is None else Moved(one, other) for one, other in pairs]
    mask = tuple(numbers[-1])
    return Call(plan.operands, results, lambda gy, x, w, *_: gradients(plan.local, gy, x, w, mask))


@composite("_convolution_double_backward")
def convolution_double_backward(
    ggx: torch.Tensor | None, ggw: torch.Tensor | None, ggb: torch.Tensor | None, gy: torch.Tensor,
    weight: torch.Tensor, input: torch.Tensor, *rest: Any,
) -> tuple[torch.Tensor | None, ...]:  # fmt: skip
    """The gradients of output gradient, input and weight, by the convolution's own operators.

    torch's composite makes the output gradient a kernel, of which sharded space would have to be gathered.
    """
    if not isinstance(gy, DTensor):
        operator = aten._convolution_double_backward.default
        result: tuple[torch.Tensor, ...] = _torch.composite(operator, (ggx, ggw, ggb, gy, weight, input, *rest), {})
        return result
    *geometry, (for_gy, for_input, for_weight) = rest
    terms = []
    if for_gy:
        terms += [torch.convolution(ggx, weight, None, *geometry)] if ggx is not None else []
        terms += [torch.convolution(input, ggw, None, *geometry)] if ggw is not None else []
        terms += [ggb.view(1, -1, *[1] * (gy.dim() - 2)).expand(gy.shape)] if ggb is not None else []
    backward = aten.convolution_backward.default
    gx = backward(gy, input, ggw, None, *geometry, [True, False, False])[0] if for_input and ggw is not None else None
    gw = backward(gy, ggx, weight, None, *geometry, [False, True, False])[1] if for_weight and ggx is not None else None
    return sum(terms[1:], terms[0]) if terms else None, gx, gw
