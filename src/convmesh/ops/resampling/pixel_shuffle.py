"""Pixel shuffle and its inverse, each of which is the other's gradient: channels become space, and space channels.

Along channels `factor ** 2` sources make one target, along space one source makes `factor`; or the other way round.
"""

from __future__ import annotations

from math import prod

import torch

from ... import _torch
from ...geometry import Dependence, Repeat, Window
from ...sharding.call import Call
from ...sharding.errors import Unfit
from ...sharding.layout import Layout
from ...sharding.plan_rule import plan_rule
from ...sharding.registry import Behaviour
from .._core.tile_plan import TiledPlan, plan_targets
from .._core.tiles import Tiling

aten = torch.ops.aten


SHUFFLE = Behaviour(
    "batch, channels, space, Partial(sum)", "nothing where shards align, else elements that change owner"
)


@plan_rule(aten.pixel_shuffle.default, aten.pixel_unshuffle.default, behaviour=SHUFFLE)
def pixel_shuffle(operator: _torch.Operator, source: Layout, factor: int) -> Call:
    plan = _plan(source, factor, operator is aten.pixel_shuffle.default)
    shape = plan.computed.local_shape

    def run(tiling: Tiling, x: torch.Tensor, factor: int) -> torch.Tensor:
        fetch = tiling.fetch_sources(x)
        if not prod(shape):
            return fetch.tie(x.new_empty(shape))
        y: torch.Tensor = operator(fetch.complete().read(tiling.sources_read), factor)
        for dim, made, wanted in zip(tiling.dims, tiling.read_by(tiling.sources_read), tiling.targets, strict=True):
            y = y.narrow(dim, wanted.start - made.start, len(wanted))
        return fetch.tie(y)

    return plan.call(run)


def _plan(source: Layout, factor: int, up: bool) -> TiledPlan:
    if len(source.shape) < 3 or factor < 1:
        raise Unfit(f"a factor of {factor} and {len(source.shape)} dimensions",
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
        raise Unfit(f"the factor {factor} does not divide the input's sizes",
                    "pad channels to a multiple of factor ** 2, or space to one of factor")  # fmt: skip
    dependences = enumerate((along_channels, along_space, along_space), len(batch))
    return plan_targets(source, (*batch, *shape), dict(dependences), True)
