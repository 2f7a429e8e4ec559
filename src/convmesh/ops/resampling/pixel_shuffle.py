"""Pixel shuffle and its inverse, each of which is the other's gradient: channels become space, and space channels.

Along channels `factor ** 2` sources make one target, along space one source makes `factor`; or the other way round.
"""

from __future__ import annotations

from math import prod
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from ... import _torch
from ...geometry import Dependence, Repeat, Window
from ...sharding.errors import refuse
from ...sharding.layout import Layout
from ...sharding.plan_cache import planned
from ...sharding.redistribute import check_placed, move
from ...sharding.registry import Behaviour, rule
from .._core.tile_plan import TiledPlan, plan_targets
from ..pooling.window import name_of

aten = torch.ops.aten


@rule(
    aten.pixel_shuffle.default,
    aten.pixel_unshuffle.default,
    behaviour=Behaviour("batch, channels, space, Partial(sum)", "nothing where shards align, else what does not"),
)
def pixel_shuffle(operator: _torch.Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> DTensor:
    input, factor = _torch.arguments(operator, args, kwargs)
    check_placed(name_of(operator), (("input", input),))
    layouts = _plan(name_of(operator), _torch.spec_of(input), int(factor), operator is aten.pixel_shuffle.default)
    if layouts.tiling is None:
        return layouts.outside(input)
    tiling = layouts.tiling
    x = move(input, layouts.operands[0])
    fetch = tiling.fetch_sources(x)
    shape = layouts.computed.local_shape
    if not prod(shape):
        return layouts.finish(fetch.tie(x.new_empty(shape)))
    y = operator(fetch.complete().read(tiling.sources_read), factor)
    for dim, made, wanted in zip(tiling.dims, tiling.read_by(tiling.sources_read), tiling.targets, strict=True):
        y = y.narrow(dim, wanted.start - made.start, len(wanted))
    return layouts.finish(fetch.tie(y))


@planned
def _plan(operator: str, input_spec: _torch.Spec, factor: int, up: bool) -> TiledPlan:
    source = Layout.of(input_spec)
    named = (("input", source),)
    if len(source.shape) < 3 or factor < 1:
        raise refuse(operator, f"a factor of {factor} and {len(source.shape)} dimensions", named,
                     "give (*, C, H, W) and a positive factor")  # fmt: skip
    *batch, channels, height, width = source.shape
    along_channels: Dependence
    along_space: Dependence
    if up:
        divides, shape = channels % factor**2 == 0, (channels // factor**2, height * factor, width * factor)
        along_channels, along_space = Window(factor**2, factor**2), Repeat(factor)
    else:
        divides = height % factor == 0 and width % factor == 0
        shape = (channels * factor**2, height // factor, width // factor)
        along_channels, along_space = Repeat(factor**2), Window(factor, factor)
    if not divides:
        raise refuse(operator, f"the factor {factor} does not divide the input's sizes", named,
                     "pad channels to a multiple of factor ** 2, or space to one of factor")  # fmt: skip
    dependences = enumerate((along_channels, along_space, along_space), len(batch))
    return plan_targets(source, (*batch, *shape), dict(dependences), True)
