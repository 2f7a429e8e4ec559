"""`scatter` and its kin: every value of a source goes to a place along a dimension, where an index says.

torch makes the gradients of `gather`, of sorting and of extremes of it. Along a sharded dimension each rank writes what
it owns: values and indices are replicated for that, or sent to who owns their places, whichever is less.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Replicate, Shard

from ... import _torch
from ...comm import routed
from ...sharding.errors import refuse
from ...sharding.gradient_placements import placements_of
from ...sharding.layout import Layout, dense_stride
from ...sharding.plan_cache import planned
from ...sharding.redistribute import layouts_of, move, specs_of
from ...sharding.registry import Behaviour, rule
from ...sharding.sharding_table import Row, Wanted, choose, input_placements, output_placements
from .._core.index_bounds import check_within, raised_alike
from .common import as_lists, idle, others, replication_price, travels_within

aten = torch.ops.aten
R = Replicate()

SCATTER = Behaviour(
    "all dimensions",
    "nothing, where the indexed dimension is not sharded; else indices and values, to the owners of their places; on "
    "CPUs one number, for bad indices, where these are sharded",
    "an input and an index with different numbers of dimensions, but for 0-d beside 1-d",
)  # fmt: skip
ZEROS = Behaviour("in backward sharded as the tensor was whose gradient it becomes", "nothing")


@dataclass(frozen=True)
class ScatterPlan:
    operands: tuple[Layout, ...]
    output: Layout
    routes: bool


@rule(
    aten.scatter.src, aten.scatter_.src, aten.scatter.value, aten.scatter_.value,
    aten.scatter_add.default, aten.scatter_add_.default, aten.scatter_reduce.two, aten.scatter_reduce_.two,
    aten.scatter.reduce, aten.scatter_.reduce, aten.scatter.value_reduce, aten.scatter_.value_reduce,
    behaviour=SCATTER,
)  # fmt: skip
def scatter(operator: _torch.Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> DTensor:
    full, dim, index, source, *how = _torch.arguments(operator, args, kwargs)
    name, in_place = _torch.name_of(operator), operator._schema.is_mutable
    lists = as_lists(full, index, source)
    if lists is not None:
        listed = aten.view.default(_functional(operator, how, lists[0], dim, *lists[1:]), list(full.shape))
        return aten.copy_.default(full, listed) if in_place else listed  # type: ignore[no-any-return]
    values = source if isinstance(source, torch.Tensor) else None
    specs = specs_of(name, (("input", full), ("index", index), ("source", values)))
    wish = specs[0].placements if in_place else placements_of(specs[0].mesh, tuple(specs[0].shape))
    plan = _plan(name, dim, not _torch.tracing(), wish, *specs)
    dim %= max(1, full.dim())
    x, at, given = (
        move(tensor, layout) for tensor, layout in zip((full, index, values), (*plan.operands, None), strict=False)
    )
    if plan.output.present and 0 not in plan.operands[1].shape:
        write = partial(_written, partial(_functional, operator, how), x, dim, at, source if values is None else given)
        size = plan.operands[0].shape[dim] if full.dim() else 1
        settled = plan.operands[0].sharded_dims[dim] if plan.routes else ()
        result = raised_alike(lambda: write(plan), at, size, plan.operands[1], settled)
    else:
        result = x if in_place else x.clone()
    if not in_place:
        return _torch.wrap(result.contiguous(), plan.output.spec)
    if plan.output.placements != full.placements:
        aten.copy_.default(full, _torch.wrap(result.contiguous(), plan.output.spec))
    elif result is not x:
        x.copy_(result)
    return full  # type: ignore[no-any-return]


def _functional(operator: _torch.Operator, how: Sequence[Any], *given: Any) -> torch.Tensor:
    """The operator that returns a new tensor, with the arguments that say how values meet in one place."""
    written: torch.Tensor = _torch.call(_torch.functional_of(operator) or operator, (*given, *how))
    return written


def _written(
    functional: Callable[..., torch.Tensor], x: torch.Tensor, dim: int, at: torch.Tensor, source: Any, plan: ScatterPlan
) -> torch.Tensor:
    if dim not in plan.operands[0].sharded_dims:
        return functional(x, dim, at, source)
    own = plan.operands[0].own(dim)
    if not plan.routes:
        check_within(at, plan.operands[0].shape[dim])
        mine = (at >= own.start) & (at < own.stop)
        # What belongs to other ranks goes to one place more, which is left out.
        shape = [*x.shape[:dim], 1, *x.shape[dim + 1 :]]
        room = torch.cat([x, x.new_zeros(shape)], dim)
        written = functional(room, dim, torch.where(mine, at - own.start, len(own)), source)
        return written.narrow(dim, 0, len(own))
    owner, offset = others(at, plan.operands[1], plan.operands[0], dim)
    route = routed(owner, plan.operands[0].mesh, plan.operands[0].sharded_dims[dim])
    values = source.expand(at.shape) if isinstance(source, torch.Tensor) and source.dim() else source
    if isinstance(values, torch.Tensor) and values.dim():
        values = values[tuple(slice(size) for size in at.shape)].reshape(-1)
        came = route.send(values)
    else:
        came = values
    written = functional(x.reshape(-1), 0, route.send(offset), came)
    return written.view(x.shape)


@planned
def _plan(
    operator: str, dim: int, routes: bool, wish: Any, *specs: _torch.Spec | None
) -> ScatterPlan:  # fmt: skip
    names = ("input", "index", "source")
    full, index, source = layouts_of(operator, list(zip(names, specs, strict=True)))
    given = [layout for layout in (full, index, source) if layout is not None]
    named = list(zip(names, given, strict=False))
    rank, count = len(full.shape), len(given)
    if not prod(index.shape):  # torch takes any index that is empty
        return ScatterPlan(tuple(given), full.dense, False)
    if any(len(layout.shape) != rank for layout in given) or not -max(1, rank) <= dim < max(1, rank):
        raise refuse(operator, f"dimension {dim} of tensors of {[len(t.shape) for t in given]} dimensions", named,
                     "give all of them the same number of dimensions")  # fmt: skip
    dim %= max(1, rank)
    alike = [d for d in range(rank) if d != dim and all(layout.shape[d] == full.shape[d] for layout in given)]
    rows = [Row("replicated", (R,) * count, (R,)), *(Row("sharded", (Shard(d),) * count, (Shard(d),)) for d in alike)]
    if rank:
        rows.append(Row("owned", (Shard(dim), *(R,) * (count - 1)), (Shard(dim),)))
    if rank and routes and (source is None or source.shape == index.shape):
        rows += [Row("sent", (Shard(dim), *(Shard(d),) * (count - 1)), (Shard(dim),)) for d in range(rank)]

    def price(row: Row, mesh_dim: int) -> float:
        size = full.mesh.size(mesh_dim)
        travels = count * prod(index.shape) * (size - 1) / size / size if row.name == "sent" else 0
        return replication_price(row, mesh_dim, given) + travels

    def fits(assignment: tuple[Row, ...]) -> bool:
        return travels_within(assignment, ("sent",)) and not any(
            idle(layout, input_placements(assignment, number)) for number, layout in enumerate(given)
        )

    wanted = [] if wish is None else [Wanted(wish, prod(full.shape))]
    chosen = choose(operator, rows, named, wanted, fits=fits, extra=price)
    operands = tuple(layout.placed(input_placements(chosen, number)) for number, layout in enumerate(given))
    output = full.new(full.shape, output_placements(chosen, 0))
    sent = any(row.name == "sent" for row in chosen)
    return ScatterPlan(operands, output, sent)


@rule(aten.new_zeros.default, behaviour=ZEROS)
def new_zeros(operator: _torch.Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Zeros that a gradient is written into are placed as the tensor, if that was remembered."""
    like, sizes = args
    shape = tuple(map(_torch.known, sizes))
    placements = placements_of(like.device_mesh, shape) if prod(shape) else None
    if placements is None:
        return _torch.stock(operator, args, kwargs)
    local = _torch.local_of(like)
    dtype = kwargs.get("dtype") or like.dtype
    layout = Layout(like.device_mesh, placements, shape, dense_stride(shape, torch.contiguous_format), dtype)
    return _torch.wrap(local.new_zeros(layout.local_shape, dtype=dtype), layout.spec)
