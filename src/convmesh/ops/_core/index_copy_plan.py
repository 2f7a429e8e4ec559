"""Planning copies of one tensor: where its operand has to be, where the result lies, and what this rank copies."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch

from ...geometry import IndexMap
from ...sharding.call import Call
from ...sharding.layout import Layout, dense_stride
from .index_copy import Fill, Remap

Maps = dict[int, IndexMap]
Stock = Callable[[torch.Tensor, Fill], torch.Tensor]


@dataclass(frozen=True)
class CopyPlan:
    """A copy along some dimensions that leaves all placements as they are."""

    source: Layout
    output: Layout
    remap: Remap | None  # None where no dimension that is sharded is mapped: then the stock operator does it

    def call(self, stock: Stock, filled: bool = False, alone: Stock | None = None, **how: Any) -> Call:
        """`stock(local, fill)` does it where none of the mapped dimensions is sharded, and `alone`, if it is given,
        where some are and yet this rank needs nothing of others. If it is `filled`, then with the last argument."""
        fills, shape = filled and self.source.adds_once, self.output.local_shape

        def run(x: torch.Tensor, *numbers: Any) -> torch.Tensor:
            value: Fill = numbers[-1] if fills else 0
            if self.remap is not None:
                return self.remap([x], value) if alone is None else alone(x, value)
            # torch refuses some empty tensors, and would do nothing for them
            return stock(x, value) if prod(shape) else x.new_empty(shape)

        return Call((self.source,), self.output, run, **how)


def copy_plan(layout: Layout, maps: Maps, partial: tuple[str, ...] = ("sum", "avg", "max", "min")) -> CopyPlan:
    """What is copied may be Partial in any way. Its adjoint, which adds, wants a sum."""
    source = layout.without_partial(*partial)
    shape = tuple(maps[dim].size if dim in maps else size for dim, size in enumerate(layout.shape))
    output = replace(source, shape=shape, stride=dense_stride(shape, layout.memory_format))
    remap = Remap.of(source, maps) if layout.present and source.sharded_over(maps) else None
    return CopyPlan(source, output, remap)
