"""Operators that need all of a dimension in its order: sorting, ranks, running products.

Where it is sharded, another dimension is sharded instead, by an all-to-all, and the results stay there. Of `topk` only
each rank's own candidates are sent. A row that is all there is to sort is sorted by all ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Replicate, Shard

from ... import _torch
from ...comm import all_gather_stacked
from ...sharding.errors import refuse
from ...sharding.gradient_placements import remember
from ...sharding.layout import Layout
from ...sharding.plan_cache import planned
from ...sharding.redistribute import layouts_of, move, specs_of
from ...sharding.registry import Behaviour, rule
from .sample_sort import sample_sort

aten = torch.ops.aten
R = Replicate()

ORDERED = Behaviour(
    "all dimensions; another one is sharded in place of the ordered one",
    "nothing; an all-to-all if the ordered dimension is sharded; a gather if no other has an index for every rank",
    "a dimension that is not there",
)  # fmt: skip
SORTED = Behaviour(
    "all dimensions; another one is sharded in place of the sorted one, if there is another",
    "nothing; an all-to-all if the sorted dimension is sharded",
    "compiled code on a sharded row without other dimensions",
)  # fmt: skip
TOPK = Behaviour(
    "all other dimensions",
    "nothing; if the dimension is sharded, k candidates of every rank, or an all-to-all where these are many",
)  # fmt: skip


@dataclass(frozen=True)
class OrderPlan:
    given: Layout  # without Partial
    source: Layout  # not sharded along the dimension
    dim: int
    alone: bool  # the dimension is sharded, and there is no other of more than one index

    @property
    def stays_sharded(self) -> bool:
        """Nothing that is sharded is replicated for the order."""
        pairs = zip(self.given.placements, self.source.placements, strict=True)
        return all(isinstance(after, Shard) for before, after in pairs if isinstance(before, Shard))

    def wrap(self, result: torch.Tensor) -> DTensor:
        """A result that has the ordered dimension, perhaps of another length, or has lost it."""
        length = result.shape[self.dim] if self.source.ndim and result.dim() == self.source.ndim else None
        layout = _result(self.source, self.dim, length, result.dtype)
        return layout.wrap(result) if layout.present else layout.absent(result)


@planned
def _result(source: Layout, dim: int, length: int | None, dtype: torch.dtype) -> Layout:
    if length is None:
        return source.without((dim,)).typed(dtype)
    return source.new((*source.shape[:dim], length, *source.shape[dim + 1 :]), dtype=dtype)


@planned
def plan_order(operator: str, spec: _torch.Spec, dim: int) -> OrderPlan:
    (layout,) = layouts_of(operator, [("input", spec)])
    rank = len(layout.shape)
    if not -max(1, rank) <= dim < max(1, rank):
        raise refuse(operator, f"the input has no dimension {dim}", [("input", layout)], "give one that it has")
    dim %= max(1, rank)
    given = layout.without_partial()
    alone = dim in given.sharded_dims and prod(layout.shape) == layout.shape[dim]
    return OrderPlan(given, given.sharded_elsewhere(dim), dim, alone)


def begin_order(operator: _torch.Operator, values: tuple[Any, ...]) -> OrderPlan:
    input, dim = values[0], values[_torch.signature(operator).names.index("dim")]
    name = _torch.name_of(operator)
    (spec,) = specs_of(name, (("input", input),))
    plan = plan_order(name, spec, -1 if dim is None else dim)
    if plan.given.sharded_dims:
        remember(spec)  # the gradient of a selection is written into zeros
    return plan


def run_unsharded(operator: _torch.Operator, values: tuple[Any, ...], plan: OrderPlan) -> Any:
    local = move(values[0], plan.source)
    if not plan.source.present:
        local = local.new_empty(plan.source.shape)  # for the shapes of the results
    results = _torch.call(operator, (local, *values[1:]))
    return tuple(plan.wrap(r) for r in results) if isinstance(results, tuple) else plan.wrap(results)


@rule(
    aten.kthvalue.default, aten.median.dim, aten.nanmedian.dim, aten.mode.default, aten.cummax.default,
    aten.cummin.default, aten.logcumsumexp.default, behaviour=ORDERED,
)  # fmt: skip
def ordered(operator: _torch.Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    values = _torch.arguments(operator, args, kwargs)
    plan = begin_order(operator, values)
    if operator is aten.kthvalue.default and plan.alone and not _torch.tracing():
        return _kth(*values)
    return run_unsharded(operator, values, plan)


def _kth(input: DTensor, k: int, dim: int, keepdim: bool) -> tuple[Any, ...]:
    """Of a row that is all there is."""
    if not 0 < k <= input.shape[dim]:
        raise refuse(
            "kthvalue", f"there is no number {k} of {input.shape[dim]}", (("input", input),), "give one of 1 to n"
        )
    found = (aten.select.int(ranked, dim, k - 1) for ranked in aten.sort.stable(input, stable=True, dim=dim))
    return tuple(aten.unsqueeze.default(one, dim) if keepdim else one for one in found)


@rule(aten.sort.default, aten.sort.stable, behaviour=SORTED)
def sort(operator: _torch.Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    values = _torch.arguments(operator, args, kwargs)
    plan = begin_order(operator, values)
    if not plan.alone:
        return run_unsharded(operator, values, plan)
    if _torch.tracing():
        raise refuse("sort", "how many values go where is not known in compiled code", (("input", values[0]),),
                     "call it outside of torch.compile, or redistribute the input to Replicate()")  # fmt: skip
    local = move(values[0], plan.given)
    if not plan.given.present:
        return plan.given.absent(local), plan.given.typed(torch.int64).absent(local)
    ranked, places = sample_sort(local.flatten(), plan.given, plan.dim, bool(values[-1]))
    output = plan.given.dense
    return (
        _torch.wrap(ranked.view(local.shape), output.spec),
        _torch.wrap(places.view(local.shape), output.typed(torch.int64).spec),
    )


@rule(aten.topk.default, behaviour=TOPK)
def topk(operator: _torch.Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The k of all are among the k of each rank."""
    values = _torch.arguments(operator, args, kwargs)
    _, k, _, largest, ordering = values
    plan = begin_order(operator, values)
    mesh_dims = plan.given.sharded_dims.get(plan.dim, ())
    if k > (plan.given.shape[plan.dim] if plan.given.shape else 1) or k < 0:
        raise refuse("topk", f"{k} of a dimension of {plan.given.shape}", (("input", values[0]),), "ask for fewer")
    few = 2 * k * prod(plan.given.mesh.size(m) for m in mesh_dims) <= plan.given.shape[plan.dim] if mesh_dims else False
    if not mesh_dims or not plan.given.present or (not few and plan.stays_sharded):
        return run_unsharded(operator, values, plan)
    dim, local = plan.dim, move(values[0], plan.given)
    counts = [min(k, size) for size, ranks in plan.given.shards(dim).runs for _ in range(ranks)]
    own = plan.given.own(dim)
    best, places = aten.topk.default(local, min(k, len(own)), dim, largest, ordering)
    shape = [*local.shape[:dim], k, *local.shape[dim + 1 :]]
    candidates = []
    for mine in (best, places + own.start):
        room = mine.new_zeros(shape)
        room.narrow(dim, 0, mine.shape[dim]).copy_(mine)
        everyone = all_gather_stacked(room, plan.given.mesh, mesh_dims)
        candidates.append(torch.cat([r.narrow(dim, 0, n) for r, n in zip(everyone, counts, strict=True)], dim))
    chosen, at = aten.topk.default(candidates[0], k, dim, largest, ordering)
    merged = OrderPlan(plan.given, plan.given.replicated(mesh_dims), dim, False)
    return merged.wrap(chosen), merged.wrap(candidates[1].gather(dim, at))
