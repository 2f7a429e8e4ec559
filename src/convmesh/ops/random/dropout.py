"""Dropout. It is linear, so a Partial(sum) may stay one: all of its terms are multiplied by the same numbers."""

from __future__ import annotations

from typing import Any

import torch

from ... import _torch
from ...kernels.mt19937 import is_generator_of
from ...sharding.call import Call
from ...sharding.layout import Layout
from ...sharding.plan_rule import plan_rule
from ...sharding.registry import made_of_others, unlisted
from .bernoulli import bernoulli_shard
from .replicated_draw import SHARED, draw_shard, drawing_layout

aten = torch.ops.aten

made_of_others(aten.dropout_.default)


@unlisted(aten.dropout.default)
def dropout(operator: _torch.Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Dropout as one operator, which reaches DTensor in inference mode only.

    torch would decompose it into `native_dropout`, as in compiled code and on GPUs, but in inference mode a CPU draws
    in storage order.
    """
    input, p, train = _torch.arguments(operator, args, kwargs)
    if not 0 < p < 1 or not train or not is_generator_of(input.device) or _torch.tracing():
        return _torch.composite(operator, args, kwargs)
    noise = aten.bernoulli_.float(aten.empty_like.default(input), 1 - p)
    return aten.mul.Tensor(input, aten.div_.Scalar(noise, 1 - p))


@plan_rule(aten.native_dropout.default, behaviour=SHARED)
def native_dropout(operator: _torch.Operator, input: Layout, p: float, train: bool | None) -> Call:
    layout = drawing_layout(input)

    def run(local: torch.Tensor, *_: Any) -> tuple[torch.Tensor, torch.Tensor]:
        if train is False or p == 0:
            noise = torch.ones_like(local)
        else:
            noise = _noise(operator, layout, local.device, p) if p < 1 else torch.zeros_like(local)
        return local * noise, noise != 0

    return Call((input,), (input, layout.typed(torch.bool)), run)


def _noise(operator: _torch.Operator, layout: Layout, device: torch.device, p: float) -> torch.Tensor:
    """Return the noise, 0 or 1 / (1 - p), drawn exactly as the operator draws it on this device."""
    # A CPU draws in the order of the dimensions, whatever the input's strides are.
    ones = bernoulli_shard(layout.new(layout.shape), device, None, 1 - p, None)
    if ones is not None:
        return ones.mul_(1 / (1 - p))

    def draw(empty: torch.Tensor, source: torch.Generator | None) -> Any:
        if source is None:
            return operator(empty.fill_(1), p, True)[0]
        return empty.bernoulli_(1 - p, generator=source).div_(1 - p)

    return draw_shard(layout, device, None, draw)
