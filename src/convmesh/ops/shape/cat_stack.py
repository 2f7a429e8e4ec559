"""Several tensors into one on DTensors: cat, stack, and putting a part into a whole.

The operands are moved to one layout at least cost. Along the dimension that they are joined in, each rank fetches what
its part of the result copies from whoever owns it.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Partial, Placement, Replicate, Shard

from ... import _torch
from ...geometry import IndexMap, index_map
from ...sharding.call import Call
from ...sharding.errors import refuse
from ...sharding.implicit_replication import the_same_everywhere
from ...sharding.layout import Layout, dense_stride
from ...sharding.plan_cache import planned
from ...sharding.plan_rule import plan_rule
from ...sharding.redistribute import check_placed, move
from ...sharding.registry import Behaviour, rule
from ...sharding.sharding_table import Row, choose, input_placements, output_placements
from .._core.index_copy import Remap
from .slice_split import bounds

aten = torch.ops.aten
R, P = Replicate(), Partial()

JOIN = Behaviour("all dimensions, Partial sums", "what changes its owner; operands that have another layout")
PUT = Behaviour("all dimensions, Partial sums", "what changes its owner; a part that has another layout")


@dataclass(frozen=True)
class JoinPlan:
    operands: tuple[Layout, ...]
    output: Layout
    remap: Remap | None  # None where the dimension is not sharded: then the stock operator joins local parts


def with_meshes(operator: str, tensors: Sequence[Any]) -> list[DTensor]:
    """All as DTensors. Autograd makes plain zeros for parts without a gradient: those are whole on every rank."""
    mesh = next(tensor.device_mesh for tensor in tensors if isinstance(tensor, DTensor))
    placed = [the_same_everywhere(t, mesh) if _made_by_autograd(t) else t for t in tensors]
    check_placed(operator, [(f"tensor {number}", tensor) for number, tensor in enumerate(placed)])
    return placed


def _made_by_autograd(tensor: torch.Tensor) -> bool:
    return not isinstance(tensor, DTensor) and _torch.in_backward()


def join_rows(operands: Sequence[Layout], shift: Callable[[int], int] = lambda dim: dim) -> list[Row]:
    """Every way to place all operands alike; `shift` is where a dimension of theirs is in the result."""
    many = len(operands)
    shards = [Row("sharded", (Shard(d),) * many, (Shard(shift(d)),)) for d in range(len(operands[0].shape))]
    return [Row("replicated", (R,) * many, (R,)), *shards, Row("Partial(sum)s", (P,) * many, (P,))]


def join_plan(
    operator: str, operands: Sequence[Layout], rows: Sequence[Row], shape: tuple[int, ...], dtype: torch.dtype,
    along: tuple[int, IndexMap] | None,
) -> JoinPlan:  # fmt: skip
    """With rows chosen and, if the dimension that `along` names is sharded, the copies along it."""
    named = [(f"tensor {number}", layout) for number, layout in enumerate(operands)]
    chosen = choose(operator, rows, named)
    placed = tuple(layout.placed(input_placements(chosen, number)) for number, layout in enumerate(operands))
    formats = {layout.memory_format for layout in operands}
    same = formats.pop() if len(formats) == 1 and len(shape) == len(operands[0].shape) else torch.contiguous_format
    output = Layout(operands[0].mesh, output_placements(chosen, 0), shape, dense_stride(shape, same), dtype)
    remap = None
    if output.present and along is not None and output.sharded_over(along[:1]):
        dim, joined = along
        remap = Remap.of(output, {dim: joined}, [layout.shape[dim] for layout in placed])
    return JoinPlan(placed, output, remap)


def run(plan: JoinPlan, tensors: Sequence[DTensor], stock: Callable[[list[torch.Tensor]], torch.Tensor]) -> DTensor:
    local = [move(tensor, target) for tensor, target in zip(tensors, plan.operands, strict=True)]
    if not plan.output.present:
        return plan.output.absent(local[0])
    local = [part if part.dtype == plan.output.dtype else part.to(plan.output.dtype) for part in local]
    return plan.output.wrap(plan.remap(local) if plan.remap is not None else stock(local))


@planned
def plan_cat(dim: int, dtype: torch.dtype, *specs: _torch.Spec) -> JoinPlan:
    operands = [Layout.of(spec) for spec in specs]
    first = operands[0].shape
    dim %= len(first)
    if any((*o.shape[:dim], *o.shape[dim + 1 :]) != (*first[:dim], *first[dim + 1 :]) for o in operands):
        raise refuse("cat", f"the shapes differ beside dimension {dim}", [("tensor", o) for o in operands], "make them")
    sizes = [operand.shape[dim] for operand in operands]
    shape = (*first[:dim], sum(sizes), *first[dim + 1 :])
    rows = join_rows(operands)
    if _torch.has_symbols(sizes):  # a compiler that does not know who owns what behind the first one
        rows = [row for row in rows if row.outputs[0] != Shard(dim)]
    return join_plan("cat", operands, rows, shape, dtype, (dim, index_map.joined(sizes)))


@plan_rule(aten.cat.default, behaviour=JOIN)
def cat(operator: _torch.Operator, given: tuple[Layout, ...], dim: int) -> Call:
    """torch lets tensors of shape (0,) stand beside any others."""
    joined = [number for number, layout in enumerate(given) if layout.shape != (0,)] or [0]
    plan = plan_cat(int(dim), common_dtype(given), *(given[number].spec for number in joined))
    placed: list[Layout | None] = [None] * len(given)
    for number, layout in zip(joined, plan.operands, strict=True):
        placed[number] = layout
    cast = any(layout.dtype != plan.output.dtype for layout in given)

    def run(values: list[torch.Tensor], dim: int) -> torch.Tensor:
        local = values if len(joined) == len(values) else [values[number] for number in joined]
        if cast:
            local = [part.to(plan.output.dtype) for part in local]
        return plan.remap(local) if plan.remap is not None else aten.cat.default(local, dim)

    return Call([placed], plan.output, run)


def common_dtype(tensors: Sequence[torch.Tensor | Layout]) -> torch.dtype:
    dtype = tensors[0].dtype
    for tensor in tensors[1:]:
        dtype = torch.promote_types(dtype, tensor.dtype)
    return dtype


@planned
def plan_stack(dim: int, dtype: torch.dtype, *specs: _torch.Spec) -> JoinPlan:
    operands = [Layout.of(spec) for spec in specs]
    first = operands[0].shape
    if any(operand.shape != first for operand in operands) or not -len(first) - 1 <= dim <= len(first):
        raise refuse("stack", "the shapes differ, or there is no such dimension", [("tensor", o) for o in operands],
                     "give tensors of one shape")  # fmt: skip
    dim %= len(first) + 1
    rows = join_rows(operands, lambda d: d + (d >= dim))
    return join_plan("stack", operands, rows, (*first[:dim], len(operands), *first[dim:]), dtype, None)


@rule(aten.stack.default, behaviour=JOIN)
def stack(operator: _torch.Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    given, dim = _torch.arguments(operator, args, kwargs)
    tensors = with_meshes("stack", given)
    plan = plan_stack(int(dim), common_dtype(given), *(_torch.spec_of(tensor) for tensor in tensors))
    return run(plan, tensors, lambda local: aten.stack.default(local, dim))


@planned
def plan_put(
    operator: str, whole_spec: _torch.Spec, part_spec: _torch.Spec, dim: int, *where: Hashable
) -> JoinPlan:  # fmt: skip
    """`where` is the slice of the whole that the part replaces."""
    whole, part = Layout.of(whole_spec), Layout.of(part_spec)
    count, first = bounds(whole.shape[dim], *where)  # type: ignore[arg-type]
    if part.shape != (*whole.shape[:dim], count, *whole.shape[dim + 1 :]):
        raise refuse(operator, f"replaces {count} of dimension {dim}", (("whole", whole), ("part", part)),
                     "give a part of the slice's shape")  # fmt: skip
    scattered = index_map.scattered(whole.shape[dim], count, first, where[2])  # type: ignore[arg-type]
    return join_plan(operator, (whole, part), join_rows((whole, part)), whole.shape, whole.dtype, (dim, scattered))


@rule(aten.slice_scatter.default, behaviour=PUT)
def slice_scatter(operator: _torch.Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    whole, part, dim, *where = _torch.arguments(operator, args, kwargs)
    pair = with_meshes("slice_scatter", (whole, part))
    dim %= max(1, whole.dim())
    plan = plan_put("slice_scatter", *(_torch.spec_of(tensor) for tensor in pair), dim, *where)
    return run(plan, pair, lambda local: aten.slice_scatter.default(*local, dim, *where))


def _select_rows(whole: Layout, part: Layout, dim: int) -> list[Row]:
    """The dimension that only the whole has may be sharded too: then the index's owner alone writes the part."""
    rows = [Row("replicated", (R, R), (R,)), Row("Partial(sum)s", (P, P), (P,))]
    for d in range(len(whole.shape)):
        placement: Placement = R if d == dim else Shard(d - (d > dim))
        rows.append(Row("sharded", (Shard(d), placement), (Shard(d),)))
    return rows


@planned
def plan_select_scatter(whole_spec: _torch.Spec, part_spec: _torch.Spec, dim: int, index: int) -> JoinPlan:
    whole, part = Layout.of(whole_spec), Layout.of(part_spec)
    size = whole.shape[dim]
    if part.shape != (*whole.shape[:dim], *whole.shape[dim + 1 :]) or not -size <= index < size:
        raise refuse("select_scatter", f"replaces index {index} of dimension {dim}",
                     (("whole", whole), ("part", part)), "give a part of the selected shape")  # fmt: skip
    return join_plan("select_scatter", (whole, part), _select_rows(whole, part, dim), whole.shape, whole.dtype, None)


@rule(aten.select_scatter.default, behaviour=PUT)
def select_scatter(operator: _torch.Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    whole, part, dim, index = _torch.arguments(operator, args, kwargs)
    pair = with_meshes("select_scatter", (whole, part))
    dim, index = dim % max(1, whole.dim()), int(index)
    plan = plan_select_scatter(*(_torch.spec_of(tensor) for tensor in pair), dim, index)

    def stock(local: list[torch.Tensor]) -> torch.Tensor:
        own, at = plan.output.own(dim), index % plan.output.shape[dim]
        if at not in own:
            return local[0].clone()
        result: torch.Tensor = aten.select_scatter.default(*local, dim, at - own.start)
        return result

    return run(plan, pair, stock)
