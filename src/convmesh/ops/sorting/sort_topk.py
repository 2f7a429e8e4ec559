"""Operators that need all of a dimension in its order: sorting, ranks, running products.

Where it is cut, another dimension is cut in its stead: everyone sends everyone a block, and the results stay where
they are. Of `topk` only each rank's own candidates travel. A row that is all there is to sort is sorted by all ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement, Replicate, Shard

from ... import _torch
from ...comm import all_gather_stacked
from ...sharding.errors import refuse
from ...sharding.gradient_placements import remember
from ...sharding.layout import Layout, dense_stride
from ...sharding.plan_cache import planned
from ...sharding.redistribute import layouts_of, move, specs_of
from ...sharding.registry import Behaviour, rule
from ..indexing.common import idle
from .sample_sort import sample_sort

aten = torch.ops.aten
R = Replicate()

ORDERED = Behaviour(
    "all dimensions; another one is cut where the ordered one was",
    "nothing; an all-to-all if the ordered dimension is cut; a gather if no other has an index for every rank",
    "a dimension that is not there",
)  # fmt: skip
SORTED = Behaviour(
    "all dimensions; another one is cut where the sorted one was, if there is another",
    "nothing; an all-to-all if the sorted dimension is cut", "compiled code on a cut row without other dimensions",
)  # fmt: skip
TOPK = Behaviour(
    "all other dimensions",
    "nothing; if the dimension is cut, k candidates of every rank, or an all-to-all where these are many",
)  # fmt: skip


@dataclass(frozen=True)
class OrderPlan:
    given: Layout  # without pending sums
    source: Layout
    dim: int
    alone: bool  # the dimension is cut, and there is nothing else to cut
    here: bool

    @property
    def keeps_cut(self) -> bool:
        """No mesh dimension loses its cut for the order."""
        pairs = zip(self.given.placements, self.source.placements, strict=True)
        return all(isinstance(after, Shard) for before, after in pairs if isinstance(before, Shard))

    def wrap(self, result: torch.Tensor) -> DTensor:
        """A result that has the ordered dimension, perhaps of another length, or has lost it."""
        lost = len(self.source.shape) - result.dim()
        shape, placements = list(self.source.shape), list(self.source.placements)
        if lost:
            del shape[self.dim]
            placements = [
                Shard(p.dim - (p.dim > self.dim)) if isinstance(p, Shard) else p for p in self.source.placements
            ]
        elif shape:
            shape[self.dim] = result.shape[self.dim]
        layout = Layout(
            self.source.mesh, tuple(placements), tuple(shape), dense_stride(tuple(shape), torch.contiguous_format),
            result.dtype,
        )  # fmt: skip
        return _torch.wrap(result.contiguous(), layout.spec)


@planned
def plan_order(operator: str, spec: _torch.Spec, dim: int) -> OrderPlan:
    (layout,) = layouts_of(operator, [("input", spec)])
    rank = len(layout.shape)
    if not -max(1, rank) <= dim < max(1, rank):
        raise refuse(operator, f"the input has no dimension {dim}", [("input", layout)], "give one that it has")
    dim %= max(1, rank)
    given = layout.placed(tuple(p if type(p) is Shard else R for p in layout.placements))
    source = given
    for mesh_dim in given.cuts.get(dim, ()):
        source = _recut(source, mesh_dim, dim)
    alone = dim in given.cuts and prod(layout.shape) == layout.shape[dim]
    return OrderPlan(given, source, dim, alone, layout.mesh.get_coordinate() is not None)


def _recut(layout: Layout, mesh_dim: int, dim: int) -> Layout:
    """Over a mesh dimension, cut the first other dimension that has something for most ranks."""
    for other in [*(d for d in range(len(layout.shape)) if d != dim), None]:
        placement: Placement = R if other is None else Shard(other)
        moved = layout.placed(tuple(placement if m == mesh_dim else p for m, p in enumerate(layout.placements)))
        if other is None or not idle(layout, moved.placements):
            break
    return moved


def begin_order(operator: _torch.Operator, values: tuple[Any, ...]) -> OrderPlan:
    input, dim = values[0], values[_torch.signature(operator).names.index("dim")]
    name = _torch.name_of(operator)
    (spec,) = specs_of(name, (("input", input),))
    plan = plan_order(name, spec, -1 if dim is None else dim)
    if plan.given.cuts:
        remember(spec)  # the gradient of a selection is written into zeros
    return plan


def run_whole(operator: _torch.Operator, values: tuple[Any, ...], plan: OrderPlan) -> Any:
    local = move(values[0], plan.source)
    if not plan.here:
        results = _torch.call(operator, (local.new_empty(plan.source.shape), *values[1:]))
        return tuple(plan.wrap(r) for r in results) if isinstance(results, tuple) else plan.wrap(results)
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
    return run_whole(operator, values, plan)


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
        return run_whole(operator, values, plan)
    if _torch.tracing():
        raise refuse("sort", "how many values go where is not known in compiled code", (("input", values[0]),),
                     "call it outside of torch.compile, or redistribute the input to Replicate()")  # fmt: skip
    local = move(values[0], plan.given)
    if not plan.here:
        return _torch.wrap(local, plan.given.spec), _torch.wrap(local.long(), plan.given.typed(torch.int64).spec)
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
    cut = plan.given.cuts.get(plan.dim, ())
    if k > (plan.given.shape[plan.dim] if plan.given.shape else 1) or k < 0:
        raise refuse("topk", f"{k} of a dimension of {plan.given.shape}", (("input", values[0]),), "ask for fewer")
    few = 2 * k * prod(plan.given.mesh.size(m) for m in cut) <= plan.given.shape[plan.dim] if cut else False
    if not cut or not plan.here or (not few and plan.keeps_cut):
        return run_whole(operator, values, plan)
    dim, local = plan.dim, move(values[0], plan.given)
    counts = [min(k, size) for size, ranks in plan.given.shards(dim).runs for _ in range(ranks)]
    own = plan.given.own(dim)
    best, places = aten.topk.default(local, min(k, len(own)), dim, largest, ordering)
    shape = [*local.shape[:dim], k, *local.shape[dim + 1 :]]
    candidates = []
    for mine in (best, places + own.start):
        room = mine.new_zeros(shape)
        room.narrow(dim, 0, mine.shape[dim]).copy_(mine)
        everyone = all_gather_stacked(room, plan.given.mesh, cut)
        candidates.append(torch.cat([r.narrow(dim, 0, n) for r, n in zip(everyone, counts, strict=True)], dim))
    chosen, at = aten.topk.default(candidates[0], k, dim, largest, ordering)
    whole = OrderPlan(plan.given, plan.given.placed(_without(plan.given, dim)), dim, False, True)
    return whole.wrap(chosen), whole.wrap(candidates[1].gather(dim, at))


def _without(layout: Layout, dim: int) -> tuple[Placement, ...]:
    return tuple(R if p == Shard(dim) else p for p in layout.placements)
