"""`gather`: every output takes one number along a dimension, where an index says.

torch makes the gradient of max unpooling of it, and the double gradient of max pooling. An index may point anywhere
along its dimension. Where that dimension is sharded, another one is sharded instead if that sends the least; or, if
every rank has all indices, each takes what it owns and contributes zeros for the others; or the indices are sent to who
owns what they point to, and the numbers come back.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Partial, Replicate, Shard

from ... import _torch
from ...comm import routed
from ...sharding.errors import refuse
from ...sharding.gradient_placements import remember
from ...sharding.layout import Layout
from ...sharding.plan_cache import planned
from ...sharding.redistribute import check_placed, move
from ...sharding.registry import Behaviour, rule
from ...sharding.sharding_table import Row, choose, input_placements, output_placements
from .._core.index_bounds import raised_alike
from .common import as_lists, idle, others, replication_price, travels_within
from .index_select import owned

aten = torch.ops.aten
R, P = Replicate(), Partial()


@dataclass(frozen=True)
class GatherPlan:
    source: Layout
    index: Layout
    output: Layout
    asks: bool  # the indices are sent along the mesh dimensions over which the indexed one is sharded


@rule(
    aten.gather.default,
    behaviour=Behaviour(
        "all dimensions; the indexed one of the input if the indices are replicated (then Partial) or sharded",
        "nothing, where the indexed dimension is not sharded; else an all-to-all of the input or of indices and "
        "results, whichever is less; compiled code gathers the input if no other dimension has an index for every rank",
        "tensors with different numbers of dimensions, but for 0-d beside 1-d",
    ),
)
def gather(operator: _torch.Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> DTensor:
    input, dim, index, _ = _torch.arguments(operator, args, kwargs)
    lists = as_lists(input, index)
    if lists is not None:
        return aten.view.default(gather(operator, (lists[0], dim, lists[1]), {}), list(index.shape))  # type: ignore[no-any-return]
    input_spec, index_spec = check_placed("gather", (("input", input), ("index", index)))
    plan = _plan(input_spec, index_spec, dim, not _torch.tracing())
    remember(input_spec)
    x, places = move(input, plan.source), move(index, plan.index)
    if not plan.source.present or not prod(plan.index.shape):
        return _torch.wrap(x.new_empty(plan.output.local_shape), plan.output.spec)
    dim %= max(1, input.dim())
    if plan.asks:
        take, settled = _asked, plan.source.sharded_dims[dim]
    else:
        take, settled = _owned if dim in plan.source.sharded_dims else _gathered, ()
    size = plan.source.shape[dim] if input.dim() else 1
    result = raised_alike(lambda: take(x, places, plan, dim), places, size, plan.index, settled)
    return _torch.wrap(result.contiguous(), plan.output.spec)


def _gathered(x: torch.Tensor, places: torch.Tensor, plan: GatherPlan, dim: int) -> torch.Tensor:
    result: torch.Tensor = aten.gather.default(x, dim, places)
    return result


def _owned(x: torch.Tensor, places: torch.Tensor, plan: GatherPlan, dim: int) -> torch.Tensor:
    local, mine = owned(places, plan.source.own(dim), plan.source.shape[dim])
    if not x.shape[dim]:
        return x.new_zeros(places.shape)
    return x.gather(dim, local).masked_fill(~mine, 0)


def _asked(x: torch.Tensor, places: torch.Tensor, plan: GatherPlan, dim: int) -> torch.Tensor:
    owner, offset = others(places, plan.index, plan.source, dim)
    route = routed(owner, plan.source.mesh, plan.source.sharded_dims[dim])
    return route.send_back(x.reshape(-1)[route.send(offset)]).view(places.shape)


@planned
def _plan(input_spec: _torch.Spec, index_spec: _torch.Spec, dim: int, routes: bool) -> GatherPlan:
    input, index = Layout.of(input_spec), Layout.of(index_spec)
    named = (("input", input), ("index", index))
    rank = len(input.shape)
    if not prod(index.shape):  # torch takes any index that is empty
        return GatherPlan(input, index.replicated(), input.replicated().new(index.shape), False)
    if rank != len(index.shape) or not -max(1, rank) <= dim < max(1, rank):
        raise refuse("gather", f"dimension {dim} of tensors of {rank} and {len(index.shape)} dimensions", named,
                     "give an index with the input's number of dimensions")  # fmt: skip
    dim %= max(1, rank)
    # A dimension of which only the first indices are read is not sharded alike in both.
    alike = [d for d in range(rank) if d != dim and input.shape[d] == index.shape[d]]
    rows = [Row("replicated", (R, R), (R,)), *(Row("sharded", (Shard(d), Shard(d)), (Shard(d),)) for d in alike)]
    if rank:
        rows.append(Row("sharded indices", (R, Shard(dim)), (Shard(dim),)))
        if input.dtype != torch.bool:  # which cannot be Partial(sum)
            rows.append(Row("owned", (Shard(dim), R), (P,)))
        if routes:
            rows += [Row("asked", (Shard(dim), Shard(d)), (Shard(d),)) for d in range(rank)]

    def price(row: Row, mesh_dim: int) -> float:
        size = input.mesh.size(mesh_dim)
        travels = {"owned": 2, "asked": 3}.get(row.name, 0) * prod(index.shape) * (size - 1) / size
        return replication_price(row, mesh_dim, (input, index)) + travels / (size if row.name == "asked" else 1)

    def fits(assignment: tuple[Row, ...]) -> bool:
        """Nothing is moved to a dimension of which half of the ranks would have nothing."""
        return travels_within(assignment, ("asked",)) and not any(
            idle(layout, input_placements(assignment, number)) for number, layout in enumerate((input, index))
        )

    chosen = choose("gather", rows, named, fits=fits, extra=price)
    output = input.new(index.shape, output_placements(chosen, 0))
    asks = any(row.name == "asked" for row in chosen)
    return GatherPlan(
        input.placed(input_placements(chosen, 0)), index.placed(input_placements(chosen, 1)), output, asks
    )
