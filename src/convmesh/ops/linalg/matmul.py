"""Products of matrices, and of batches of them, whichever of their dimensions are cut.

Rows of the first operand and columns of the second stay cut, and so does the batch. A cut dimension that is summed over
leaves a pending sum: of a Gram matrix over pixels every rank has the terms of its own pixels. Where both rows and
columns are cut over the same ranks, one of them has to be moved: to the batch, where that has work for all ranks, and
else the smaller operand is made whole. torch makes einsum, the gradients and attention of these operators.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Partial, Placement, Replicate, Shard

from ... import _torch
from ...sharding.errors import refuse
from ...sharding.gradient_placements import Hints
from ...sharding.layout import Layout, dense_stride
from ...sharding.plan_cache import planned
from ...sharding.redistribute import layouts_of, move, specs_of
from ...sharding.registry import Behaviour, rule
from ...sharding.sharding_table import Assignment, Row, Wanted, choose, input_placements, output_placements
from ..indexing.common import idle, whole_price

aten = torch.ops.aten
R, P = Replicate(), Partial()

PRODUCT = Behaviour(
    "batch, rows, columns; a pending sum where what is summed over is cut; pending sums",
    "nothing; where rows and columns are cut over the same ranks an all-to-all to the batch, or the smaller operand",
    "shapes that do not fit",
)  # fmt: skip


@dataclass(frozen=True)
class ProductPlan:
    operands: tuple[Layout, ...]
    output: Layout
    adds: bool  # where the product is Partial one rank adds it, or all add their terms of it
    here: bool


def _rows(batched: bool) -> list[Row]:
    """(first [B] M K, second [B] K N) -> ([B] M N)"""
    m, k, n = (1, 2, 2) if batched else (0, 1, 1)
    rows = [
        Row("replicated", (R, R), (R,)),
        Row("rows", (Shard(m), R), (Shard(m),)),
        Row("columns", (R, Shard(n)), (Shard(n),)),
        Row("summed over", (Shard(k), Shard(k - 1)), (P,)),
        Row("pending first", (P, R), (P,)),
        Row("pending second", (R, P), (P,)),
    ]
    return [rows[0], Row("batch", (Shard(0), Shard(0)), (Shard(0),)), *rows[1:]] if batched else rows


ROWS = {batched: tuple(_rows(batched)) for batched in (False, True)}


@planned
def plan_product(
    operator: str, first_spec: _torch.Spec, second_spec: _torch.Spec, added_spec: _torch.Spec | None,
    like: tuple[Placement, ...] | None = None,
) -> ProductPlan:  # fmt: skip
    """`added` is what addmm and baddbmm add to the product; `like` is where it should lie, if that is known."""
    named = [("first", first_spec), ("second", second_spec), ("added", added_spec)]
    first, second, added = layouts_of(operator, named)
    shape = _shape(operator, first, second, added)
    layouts = [(name, t) for name, t in (("first", first), ("second", second), ("added", added)) if t is not None]
    given = [layout for _, layout in layouts]

    def price(row: Row, mesh_dim: int) -> float:
        """A pending sum is going to be reduced, and what is made whole takes memory, too."""
        size = first.mesh.size(mesh_dim)
        whole = whole_price(row, mesh_dim, given)
        return whole + (2 * prod(shape) * (size - 1) / size if row.outputs[0] == P and like is None else 0)

    def fits(assignment: Assignment) -> bool:
        """Nothing is moved to a dimension of which half of the ranks would have nothing."""
        return not any(idle(layout, input_placements(assignment, number)) for number, layout in enumerate(given))

    wanted = [] if like is None else [Wanted(like, prod(shape))]
    rows = [new for row in ROWS[len(shape) == 3] for new in _with_added(row, added, shape)]
    chosen = choose(operator, rows, layouts, wanted, fits=fits, extra=price)
    operands = tuple(layout.placed(input_placements(chosen, number)) for number, layout in enumerate(given))
    output = Layout(
        first.mesh, output_placements(chosen, 0), shape, dense_stride(shape, torch.contiguous_format), first.dtype
    )
    place = first.mesh.get_coordinate()
    here = place is not None
    once = [m for m, row in enumerate(chosen) if row.outputs[0] == P and row.inputs[-1] != P]
    adds = place is not None and not any(place[m] for m in once)
    return ProductPlan(operands, output, adds, here)


def _shape(operator: str, first: Layout, second: Layout, added: Layout | None) -> tuple[int, ...]:
    fitting = len(first.shape) == len(second.shape) in (2, 3) and first.dtype == second.dtype
    fitting = fitting and first.shape[-1] == second.shape[-2] and first.shape[:-2] == second.shape[:-2]
    shape = (*first.shape[:-1], second.shape[-1]) if fitting else ()
    if fitting and added is not None:
        new = len(shape) - len(added.shape)
        fitting = new >= 0 and all(size in (1, shape[new + dim]) for dim, size in enumerate(added.shape))
    if not fitting:
        raise refuse(operator, "the operands do not fit each other",
                     (("first", first), ("second", second), ("added", added)),
                     "give matrices of one dtype, with as many columns in the first as rows in the second")  # fmt: skip
    return shape


def _with_added(row: Row, added: Layout | None, shape: tuple[int, ...]) -> list[Row]:
    """The same way to run for a third operand, which is added: sharded as the product is where it has all of that, and
    Partial or replicated where the product is Partial."""
    if added is None:
        return [row]
    new, (output,) = len(shape) - len(added.shape), row.outputs
    alike = isinstance(output, Shard) and output.dim >= new and added.shape[output.dim - new] == shape[output.dim]
    third = Shard(output.dim - new) if alike and isinstance(output, Shard) else R
    return [Row(row.name, (*row.inputs, one), row.outputs) for one in ((R, P) if output == P else (third,))]


_factors = Hints()


def _remember(first: _torch.Spec, second: _torch.Spec) -> None:
    """Where the factors lie, by the shapes of the products that are their gradients: those should lie there, too."""
    (*batch, m, k), n = first.shape, second.shape[-1]
    # Of a factor whose columns are next to each other in memory torch makes the gradient transposed. That is rarer, so
    # it comes first: where shapes do not tell one from the other, the later one counts.
    _factors.remember((first.mesh, (*batch, k, n), (*batch, n, m)), _transposed(first))
    _factors.remember((first.mesh, (*batch, n, m), (*batch, m, k)), _transposed(second))
    _factors.remember((first.mesh, (*batch, k, m), (*batch, m, n)), second.placements)
    _factors.remember((first.mesh, (*batch, m, n), (*batch, n, k)), first.placements)


def _transposed(spec: _torch.Spec) -> tuple[Placement, ...]:
    rows = len(spec.shape) - 2
    flip: dict[Placement, Placement] = {Shard(rows): Shard(rows + 1), Shard(rows + 1): Shard(rows)}
    return tuple(flip.get(placement, placement) for placement in spec.placements)


@rule(aten.mm.default, aten.bmm.default, behaviour=PRODUCT)
def product(operator: _torch.Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> DTensor:
    first, second = _torch.arguments(operator, args, kwargs)
    name = _torch.name_of(operator)
    specs = specs_of(name, (("first", first), ("second", second)))
    like = _factors.recall((specs[0].mesh, tuple(first.shape), tuple(second.shape)))
    plan = plan_product(name, *specs, None, like)
    _remember(*specs)
    if not plan.here:
        return _torch.wrap(_torch.local_of(first).new_empty(0), plan.output.spec)
    result = operator(move(first, plan.operands[0]), move(second, plan.operands[1]))
    return _torch.wrap(result.contiguous(), plan.output.spec)


@rule(aten.addmm.default, aten.baddbmm.default, behaviour=PRODUCT)
def product_and_sum(operator: _torch.Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> DTensor:
    added, first, second, beta, alpha = _torch.arguments(operator, args, kwargs)
    name = _torch.name_of(operator)
    specs = specs_of(name, (("first", first), ("second", second), ("added", added)))
    plan = plan_product(name, *specs)
    _remember(*specs[:2])
    if not plan.here:
        return _torch.wrap(_torch.local_of(first).new_empty(0), plan.output.spec)
    a, b, c = (move(tensor, layout) for tensor, layout in zip((first, second, added), plan.operands, strict=True))
    return _torch.wrap(operator(c, a, b, beta=beta if plan.adds else 0, alpha=alpha).contiguous(), plan.output.spec)
