"""Products of matrices, and of batches of them, whichever of their dimensions are sharded.

Rows of the first operand and columns of the second stay sharded, and so does the batch. Where the dimension that is
summed over is sharded, the product is Partial(sum): of a Gram matrix over pixels every rank has the terms of its own
pixels. Where both rows and columns are sharded over the same ranks, one of them has to be moved: to the batch, where
that has work for all ranks, and else the smaller operand is replicated. torch makes einsum, the gradients and attention
of these operators.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement, Shard

from ... import _torch
from ...sharding.errors import refuse
from ...sharding.gradient_placements import Hints, Placements
from ...sharding.layout import Layout
from ...sharding.plan_cache import Table
from ...sharding.redistribute import layouts_of, specs_of
from ...sharding.registry import Behaviour, rule
from ...sharding.result_strides import results_of
from ...sharding.sharding_table import Assignment, P, R, Row, Wanted, choose, input_placements
from ...sharding.table_plan import TablePlan
from ..indexing.common import idle, whole_price

aten = torch.ops.aten

PRODUCT = Behaviour(
    "batch, rows, columns; Partial(sum) where what is summed over is sharded; Partial(sum)",
    "nothing; where rows and columns are sharded over the same ranks an all-to-all to the batch, or the smaller one",
    "shapes that do not fit",
)  # fmt: skip


def _rows(batched: bool) -> list[Row]:
    """(first [B] M K, second [B] K N) -> ([B] M N)"""
    m, k, n = (1, 2, 2) if batched else (0, 1, 1)
    rows = [
        Row("replicated", (R, R), (R,)),
        Row("rows", (Shard(m), R), (Shard(m),)),
        Row("columns", (R, Shard(n)), (Shard(n),)),
        Row("summed over", (Shard(k), Shard(k - 1)), (P,)),
        Row("sum first", (P, R), (P,)),
        Row("sum second", (R, P), (P,)),
    ]
    return [rows[0], Row("batch", (Shard(0), Shard(0)), (Shard(0),)), *rows[1:]] if batched else rows


ROWS = {batched: tuple(_rows(batched)) for batched in (False, True)}


def _plan(
    operator: _torch.Operator, args: tuple[Any, ...], numbers: Sequence[int], specs: Sequence[_torch.Spec],
    like: Placements | None,
) -> TablePlan:  # fmt: skip
    """`numbers` are the arguments first, second and, if any, added; the product should be placed `like` this, if that
    is known."""
    name = _torch.name_of(operator)
    layouts = list(zip(("first", "second", "added"), specs, strict=False))
    given = layouts_of(name, layouts)
    first, second, added = (*given, None)[:3]
    shape = _shape(name, first, second, added)

    def price(row: Row, mesh_dim: int) -> float:
        """A Partial product is going to be reduced, and what is replicated takes memory, too."""
        size = first.mesh.size(mesh_dim)
        reduced = 2 * prod(shape) * (size - 1) / size if row.outputs[0] == P and like is None else 0
        return whole_price(row, mesh_dim, given) + reduced

    def fits(assignment: Assignment) -> bool:
        """Nothing is moved to a dimension of which half of the ranks would have nothing."""
        return not any(idle(layout, input_placements(assignment, number)) for number, layout in enumerate(given))

    wanted = [] if like is None else [Wanted(like, prod(shape))]
    rows = [new for row in ROWS[len(shape) == 3] for new in _with_added(row, added, shape)]
    named = [(name, layout) for (name, _), layout in zip(layouts, given, strict=True)]
    chosen = choose(name, rows, named, wanted, fits=fits, extra=price)
    made = results_of(operator, *_torch.by_name(operator, args))
    local = None if added is None else _added_once
    # An empty product is no special case: also a rank that has nothing to multiply may have to add.
    return TablePlan.of(
        operator, args, dict(zip(numbers, given, strict=True)), chosen, made, local=local, communicates=True
    )


def _added_once(plan: TablePlan, added: Layout, *_: object) -> Callable[..., torch.Tensor]:
    """Where the product is Partial one rank adds what is added, or all add their terms of it."""
    (result,) = plan.results
    assert result is not None
    pairs = zip(result.computed.placements, added.placements, strict=True)
    once = [mesh_dim for mesh_dim, (at, beside) in enumerate(pairs) if at == P and beside != P]
    adds = all(added.mesh.get_local_rank(mesh_dim) == 0 for mesh_dim in once)
    return lambda added, first, second, beta, alpha: plan.operator(
        added, first, second, beta=beta if adds else 0, alpha=alpha
    )


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
    """The same row for a third operand, which is added: sharded as the product where it has all of the dimension, and
    Partial or replicated where the product is Partial."""
    if added is None:
        return [row]
    new, (output,) = len(shape) - len(added.shape), row.outputs
    alike = isinstance(output, Shard) and output.dim >= new and added.shape[output.dim - new] == shape[output.dim]
    third = Shard(output.dim - new) if alike and isinstance(output, Shard) else R
    return [Row(row.name, (*row.inputs, one), row.outputs) for one in ((R, P) if output == P else (third,))]


_factors = Hints()


def _remember(first: _torch.Spec, second: _torch.Spec) -> None:
    """The placements of the factors, by the shapes of the products that are their gradients: these should have them."""
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


_plans = Table()


def _product(
    operator: _torch.Operator, args: tuple[Any, ...], numbers: Sequence[int], specs: list[_torch.Spec],
    like: Placements | None = None,
) -> DTensor:  # fmt: skip
    plan = _plans.look_up((operator, like, *specs), lambda: _plan(operator, args, numbers, specs, like))
    _remember(specs[0], specs[1])
    product: DTensor = plan.run(args)
    return product


@rule(aten.mm.default, aten.bmm.default, behaviour=PRODUCT, knows_strides=True)
def product(operator: _torch.Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> DTensor:
    first, second = args = _torch.arguments(operator, args, kwargs)
    specs = specs_of(_torch.name_of(operator), (("first", first), ("second", second)))
    like = _factors.recall((specs[0].mesh, tuple(first.shape), tuple(second.shape)))
    return _product(operator, args, (0, 1), specs, like)


@rule(aten.addmm.default, aten.baddbmm.default, behaviour=PRODUCT, knows_strides=True)
def product_and_sum(operator: _torch.Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> DTensor:
    added, first, second, *_ = args = _torch.arguments(operator, args, kwargs)
    specs = specs_of(_torch.name_of(operator), (("first", first), ("second", second), ("added", added)))
    return _product(operator, args, (1, 2, 0), specs)
