"""Planning copies of one tensor: the layouts of operand and result, and what this rank copies."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch

from ...geometry import IndexMap
from ...sharding.call import Call
from ...sharding.layout import Layout, dense_stride
from .index_copy import DistributedCopy, Fill

Maps = dict[int, IndexMap]
LocalOp = Callable[[torch.Tensor, Fill], torch.Tensor]


@dataclass(frozen=True)
class CopyPlan:
    """A copy along some dimensions that keeps all placements."""

    source: Layout
    output: Layout
    copy: DistributedCopy | None  # None where no mapped dimension is sharded: torch's operator runs on local tensors

    def call(
        self, local_op: LocalOp, filled: bool = False, without_exchange: LocalOp | None = None, **how: Any
    ) -> Call:
        """Return a `Call` that runs `local_op(local, fill)` where no mapped dimension is sharded, else the exchange.

        `without_exchange(local, fill)`, if given, replaces the exchange; for sharded dimensions of which no rank needs
        remote values. With `filled`, the fill value is the operator's last argument, else 0.
        """
        fills, shape = filled and self.source.adds_once, self.output.local_shape

        def run(x: torch.Tensor, *numbers: Any) -> torch.Tensor:
            value: Fill = numbers[-1] if fills else 0
            if self.copy is not None:
                return self.copy([x], value) if without_exchange is None else without_exchange(x, value)
            # torch refuses some empty tensors, for which there is nothing to do
            return local_op(x, value) if prod(shape) else x.new_empty(shape)

        return Call((self.source,), self.output, run, **how)


def copy_plan(layout: Layout, maps: Maps, partial: tuple[str, ...] = ("sum", "avg", "max", "min")) -> CopyPlan:
    """Plan a copy of a tensor of `layout` by `maps`.

    A copy accepts any Partial; its adjoint, which adds, only `partial=("sum",)`. Other Partials are reduced first.
    """
    source = layout.without_partial(*partial)
    shape = tuple(maps[dim].size if dim in maps else size for dim, size in enumerate(layout.shape))
    output = replace(source, shape=shape, stride=dense_stride(shape, layout.memory_format))
    copy = DistributedCopy.of(source, maps) if layout.present and source.sharded_over(maps) else None
    return CopyPlan(source, output, copy)
