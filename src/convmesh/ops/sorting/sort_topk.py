"""Operators that need a full dimension in order: sort, topk, k-th values, medians, modes, cumulative extremes.

Where that dimension is sharded, an all-to-all shards another dimension instead, and the results stay so. `topk` sends
only each rank's own candidates. If there is no other dimension, `sort` and `kthvalue` use a distributed sort.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Shard

from ... import _torch
from ...comm import all_gather_stacked
from ...geometry import Interval
from ...sharding.call import Call
from ...sharding.errors import Unfit, refuse
from ...sharding.layout import Layout
from ...sharding.plan_rule import Made, plan_rule
from ...sharding.registry import Behaviour
from .._core.index_bounds import can_route
from .sample_sort import sample_sort

aten = torch.ops.aten

ORDERED = Behaviour(
    "all dimensions; another one is sharded in place of the ordered one",
    "nothing; an all-to-all if the ordered dimension is sharded, or it is gathered if no other has an index for every "
    "rank",
    "a dimension that the input does not have",
)  # fmt: skip
SORTED = Behaviour(
    "all dimensions; another one is sharded in place of the sorted one, if there is another",
    "nothing; an all-to-all if the sorted dimension is sharded",
    "in compiled code, a sharded dimension if all others have size 1",
)  # fmt: skip
TOPK = Behaviour(
    "all other dimensions",
    "nothing; if the dimension is sharded, an all-gather of each rank's k candidates, or an all-to-all for a large k",
)  # fmt: skip


@dataclass(frozen=True)
class OrderedDim:
    """A dimension that an operator needs in full and in order, and the layouts of the operator's input."""

    input: Layout  # not Partial
    source: Layout  # `input` with another dimension sharded in place of `dim`
    dim: int

    @staticmethod
    def of(input: Layout, dim: int) -> OrderedDim:
        """Plan for dimension `dim` of `input`."""
        rank = max(1, input.ndim)
        if not -rank <= dim < rank:
            raise Unfit(f"the input has no dimension {dim}", "give one that it has")
        layout = input.without_partial()
        return OrderedDim(layout, layout.sharded_elsewhere(dim % rank), dim % rank)

    @property
    def length(self) -> int:
        """The size of the dimension."""
        return self.input.shape[self.dim] if self.input.shape else 1

    @property
    def mesh_dims(self) -> tuple[int, ...]:
        """The mesh dimensions over which the dimension is sharded."""
        return self.input.sharded_dims.get(self.dim, ())

    @property
    def is_single_row(self) -> bool:
        """Whether the dimension is sharded and all others have size 1."""
        return bool(self.mesh_dims) and prod(self.input.shape) == self.length

    @property
    def stays_sharded(self) -> bool:
        """Whether nothing that is sharded has to be replicated."""
        pairs = zip(self.input.placements, self.source.placements, strict=True)
        return all(isinstance(after, Shard) for before, after in pairs if isinstance(before, Shard))

    def results(self, source: Layout, length: int | None) -> tuple[Layout, Layout]:
        """The layouts of values and indices, with the dimension at this length, or without it if `length` is None."""
        values = source.without((self.dim,))
        if length is not None and source.ndim:
            values = source.new((*source.shape[: self.dim], length, *source.shape[self.dim + 1 :]))
        return values, values.typed(torch.int64)

    def call(self, operator: _torch.Operator, length: int | None, dtype: torch.dtype | None = None) -> Call:
        """Return a `Call` of the operator itself, on `source`."""
        values, places = self.results(self.source, length)
        one = _torch.gives_one_tensor(operator)
        results = values.typed(dtype or values.dtype) if one else (values, places)
        return Call((self.source,), results, lambda *arguments: _torch.call(operator, arguments))


@plan_rule(
    aten.kthvalue.default, aten.median.dim, aten.nanmedian.dim, aten.mode.default, aten.cummax.default,
    aten.cummin.default, aten.logcumsumexp.default, behaviour=ORDERED, remembers=True, asks=can_route,
)  # fmt: skip
def ordered(operator: _torch.Operator, input: Layout, *how: Any) -> Call | Made:
    *numbers, routes = how
    named = dict(zip(_torch.signature(operator).names[1:], numbers, strict=True))
    order = OrderedDim.of(input, named["dim"])
    if operator is aten.kthvalue.default and order.is_single_row and routes:
        return _kth
    length = 1 if named.get("keepdim") else None if "keepdim" in named else order.length
    return order.call(operator, length)


def _kth(input: DTensor, k: int, dim: int, keepdim: bool) -> tuple[Any, ...]:
    """Return the k-th value of a row that has no other dimensions."""
    if not 0 < k <= input.shape[dim]:
        raise refuse(
            "kthvalue", f"there is no number {k} of {input.shape[dim]}", (("input", input),), "give one of 1 to n"
        )
    found = (aten.select.int(ranked, dim, k - 1) for ranked in aten.sort.stable(input, stable=True, dim=dim))
    return tuple(aten.unsqueeze.default(one, dim) if keepdim else one for one in found)


@plan_rule(aten.sort.default, aten.sort.stable, behaviour=SORTED, remembers=True, asks=can_route)
def sort(operator: _torch.Operator, input: Layout, *how: Any) -> Call:
    *_, dim, descending, routes = how
    order = OrderedDim.of(input, dim)
    if not order.is_single_row:
        return order.call(operator, order.length)
    if not routes:
        raise Unfit("sorting a sharded row depends on values, which compiled code does not know",
                    "call it outside of torch.compile, or redistribute the input to Replicate()")  # fmt: skip

    def run(local: torch.Tensor, *_: Any) -> list[torch.Tensor]:
        found = sample_sort(local.flatten(), order.input, order.dim, descending)
        return [one.view(local.shape) for one in found]

    return Call((order.input,), (order.input.dense, order.input.dense.typed(torch.int64)), run)


@plan_rule(aten.topk.default, behaviour=TOPK, remembers=True)
def topk(operator: _torch.Operator, input: Layout, k: int, dim: int, largest: bool, ordering: bool) -> Call:
    """Plan top-k: the k largest of all are among the k largest of each rank."""
    order = OrderedDim.of(input, dim)
    layout, dim, mesh_dims = order.input, order.dim, order.mesh_dims
    if not 0 <= k <= order.length:
        raise Unfit(f"{k} of a dimension of {layout.shape}", "ask for fewer")
    few = 2 * k * prod(layout.mesh.size(m) for m in mesh_dims) <= order.length
    if not mesh_dims or (not few and order.stays_sharded):
        return order.call(operator, k)
    counts = [min(k, size) for size, ranks in layout.shards(dim).runs for _ in range(ranks)]
    own = layout.own(dim) if layout.present else Interval(0, 0)

    def run(local: torch.Tensor, *_: Any) -> tuple[torch.Tensor, torch.Tensor]:
        best, places = operator(local, min(k, len(own)), dim, largest, ordering)
        values, indices = (all_candidates(own_candidates) for own_candidates in (best, places + own.start))
        topk_values, at = operator(values, k, dim, largest, ordering)
        return topk_values, indices.gather(dim, at)

    def all_candidates(own_candidates: torch.Tensor) -> torch.Tensor:
        """All-gather the candidates of all ranks along the dimension."""
        padded = own_candidates.new_zeros([*own_candidates.shape[:dim], k, *own_candidates.shape[dim + 1 :]])
        padded.narrow(dim, 0, own_candidates.shape[dim]).copy_(own_candidates)
        all_padded = all_gather_stacked(padded, layout.mesh, mesh_dims)
        return torch.cat([r.narrow(dim, 0, n) for r, n in zip(all_padded, counts, strict=True)], dim)

    return Call((layout,), order.results(layout.replicated(mesh_dims), k), run)
