"""The gradients of a convolution of one rank's tile, with the halo that they need.

A pair of a fine and a coarse index that touch each other adds to the weight gradient once: on the rank that owns
the one of the two whose halo is not fetched. So the one halo that the input gradient needs serves the weight's too,
and the other side's halo is never sent.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch

from ...comm import Held
from ...geometry import Box, HaloPlan, slabs
from ...kernels.convolution import bias_gradient
from .._core.tiles import recompute_border
from . import halo_taps
from .local import LocalConvolution

Gradients = tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]


def gradients(
    local: LocalConvolution | None, gy: torch.Tensor, x: torch.Tensor, w: torch.Tensor, mask: Sequence[bool]
) -> Gradients:
    """Of input, weight and bias, where `mask` asks for them."""
    assert local is not None, "nothing is computed outside of the mesh"
    tiling = local.tiling
    if not tiling.dims:
        return local.own_gradients(gy, x, w, mask)
    for_input, for_weight, for_bias = mask
    if not (for_input or for_weight):
        return None, None, bias_gradient(gy) if for_bias else None
    fine, coarse = (gy, x) if local.conv.transposed else (x, gy)
    fetches_output = for_input or not _cheaper_to_fetch_input(local, w.shape)
    fetches_fine = fetches_output == local.conv.transposed
    gathered = local.gathered(x, fetches_fine) if gy.numel() and w.numel() else None
    if gathered is not None:
        return gathered.gradients(gy, x, w, tuple(mask), fetches_output)
    fetch = tiling.fetch_sources(fine) if fetches_fine else tiling.fetch_targets(coarse)

    own_side = coarse if fetches_fine else fine

    def input_gradient(held: Held, box: Box) -> torch.Tensor:
        return local.part(held, box, w, None, to_fine=not local.conv.transposed)

    def weight_gradient(held: Held, halo: Box) -> torch.Tensor:
        return local.weight_gradient(*tiling.pair(held, own_side, halo, fetches_fine), w)

    produced, inner = tiling.produced_by(not local.conv.transposed)
    if tiling.reaches_far:
        wide_gy, wide_x, wide_w = halo_taps.widened(gy, x, w)
        results = local.own_gradients(wide_gy, wide_x, wide_w, mask)
        own = wide_gy if fetches_fine != local.conv.transposed else wide_x
        halo_taps.add_gradients(local, own, *results[:2], fetch, fetches_fine, wide_w)
        gx, gw, gb = (None if result is None else fetch.tie(result.to(w.dtype)) for result in results)
        return gx, gw, gb
    if not tiling.computes_own:
        held = fetch.complete()
        return (
            fetch.tie(input_gradient(held, produced)) if for_input else None,
            fetch.tie(weight_gradient(held, fetch.needed)) if for_weight else None,
            bias_gradient(gy) if for_bias else None,
        )
    gx, gw, gb = local.own_gradients(gy, x, w, mask)
    if halo_taps.pays(w):
        halo_taps.add_gradients(local, own_side, gx, gw, fetch, fetches_fine, w)
    else:
        if gx is not None:
            recompute_border(gx, fetch, produced, inner, input_gradient)
        if gw is not None:
            held = fetch.complete()
            inside = tuple(own & needed for own, needed in zip(fetch.own_box, fetch.needed, strict=True))
            for strips in slabs(fetch.needed, inside):
                for strip in strips:
                    gw += weight_gradient(held, strip)
    return None if gx is None else fetch.tie(gx), None if gw is None else fetch.tie(gw), gb


def _cheaper_to_fetch_input(local: LocalConvolution, weight_shape: Sequence[int]) -> bool:
    """Whether the input's halo has fewer elements than the output gradient's, summed over all ranks.

    Computed from global sizes only, because all ranks have to fetch the same side.
    """
    tiling = local.tiling
    fine = _part_sent(tiling.source_halos.plans) * weight_shape[1] * prod(local.fine_sizes)
    coarse = (
        _part_sent(tiling.target_halos.plans)
        * (weight_shape[0] // max(1, local.conv.groups))
        * prod(local.coarse_sizes)
    )
    return coarse < fine if local.conv.transposed else fine < coarse


def _part_sent(plans: Sequence[HaloPlan]) -> float:
    """Which part of a tensor is sent, about: the sum over its sharded dimensions."""
    return sum(plan.sent / plan.size for plan in plans)
