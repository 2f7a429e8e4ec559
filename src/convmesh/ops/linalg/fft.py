"""Fourier transforms: each output depends on every input along the transformed dimensions, so these are not sharded.

Other dimensions (samples, channels) are sharded over the same ranks instead, which takes an all-to-all in place of an
all-gather. The result keeps these placements: most operations on frequencies work per channel, or on few frequencies,
and the inverse transform finds its dimensions unsharded.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from ...sharding.layout import Layout
from ...sharding.registry import Behaviour
from ...sharding.sharding_table import P, R, Row, Shard
from ...sharding.table_rule import table_rule

aten = torch.ops.aten

FOURIER = Behaviour(
    "dimensions that are not transformed, Partial(sum); one of them is sharded in place of a transformed one",
    "nothing; an all-to-all where a transformed dimension is sharded, or it is gathered if there is no other one",
)  # fmt: skip


def _rows(input: Layout, dims: list[int], *_: object) -> Iterator[Row]:
    """Rows that shard any dimension that is not transformed; longer ones first, so that these win ties."""
    transformed = {dim % input.ndim for dim in dims}
    yield Row("replicated", (R,), (R,))
    yield Row("sum", (P,), (P,))
    free = [dim for dim, size in enumerate(input.shape) if dim not in transformed]
    for dim in sorted(free, key=lambda dim: -input.shape[dim]):
        if input.shape[dim] > 1 or dim in input.sharded_dims:
            yield Row("other dimensions", (Shard(dim),), (Shard(dim),))


table_rule(aten._fft_c2c.default, aten._fft_c2r.default, behaviour=FOURIER)(_rows)
table_rule(aten._fft_r2c.default, behaviour=FOURIER, remembers=True)(_rows)
