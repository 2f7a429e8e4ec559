"""Pixel shuffle and its inverse, each of which is the other's gradient: channels become space, and space channels.

Along channels `factor ** 2` sources make one target, along space one source makes `factor`; or the other way round.
"""

from __future__ import annotations

from math import prod
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from ... import _torch
from ...geometry import Reading, Repeat, Window
from ...sharding.errors import refuse
from ...sharding.layout import Layout
from ...sharding.plan_cache import planned
from ...sharding.redistribute import check_placed, move
from ...sharding.registry import Behaviour, rule
from .._core.reach import ReachPlan, plan_targets
from ..pooling.window import name_of

aten = torch.ops.aten


@rule(
    aten.pixel_shuffle.default,
    aten.pixel_unshuffle.default,
    behaviour=Behaviour("batch, channels, space, pending sums", "nothing where shards align, else what does not"),
)
def pixel_shuffle(operator: _torch.Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> DTensor:
    input, factor = _torch.arguments(operator, args, kwargs)
    check_placed(name_of(operator), (("input", input),))
    layouts = _plan(name_of(operator), _torch.spec_of(input), int(factor), operator is aten.pixel_shuffle.default)
    if layouts.reach is None:
        return layouts.outside(input)
    reach = layouts.reach
    x = move(input, layouts.operands[0])
    fetch = reach.fetch(x)
    shape = layouts.computed.local_shape
    if not prod(shape):
        return layouts.finish(fetch.tie(x.new_empty(shape)))
    y = operator(fetch.held.read(reach.read), factor)
    for dim, cut, side, wanted in zip(reach.dims, reach.cuts, reach.read, reach.targets, strict=True):
        made = cut.reading.read_by(side) if isinstance(cut.reading, Repeat) else wanted
        y = y.narrow(dim, wanted.start - made.start, len(wanted))
    return layouts.finish(fetch.tie(y))


@planned
def _plan(operator: str, input_spec: _torch.Spec, factor: int, up: bool) -> ReachPlan:
    source = Layout.of(input_spec)
    named = (("input", source),)
    if len(source.shape) < 3 or factor < 1:
        raise refuse(operator, f"a factor of {factor} and {len(source.shape)} dimensions", named,
                     "give (*, C, H, W) and a positive factor")  # fmt: skip
    *batch, channels, height, width = source.shape
    merging: Reading
    if up:
        whole, shape = channels % factor**2 == 0, (channels // factor**2, height * factor, width * factor)
        merging, space = Window(factor**2, factor**2), Repeat(factor)
        readings: dict[int, Reading] = {-3: merging, -2: space, -1: space}
    else:
        whole = height % factor == 0 and width % factor == 0
        shape = (channels * factor**2, height // factor, width // factor)
        merging = Window(factor, factor)
        readings = {-3: Repeat(factor**2), -2: merging, -1: merging}
    if not whole:
        raise refuse(operator, f"the factor {factor} does not divide the input's sizes", named,
                     "pad channels to a multiple of factor ** 2, or space to one of factor")  # fmt: skip
    rank = len(source.shape)
    return plan_targets(source, (*batch, *shape), {rank + dim: reading for dim, reading in readings.items()}, True)
