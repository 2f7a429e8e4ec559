"""Products of matrices, and of batches of them, whichever of their dimensions are sharded.

Rows of the first operand and columns of the second stay sharded, and so does the batch. Where the dimension that is
summed over is sharded, the product is Partial(sum): of a Gram matrix over pixels every rank has the terms of its own
pixels. Where both rows and columns are sharded over the same ranks, one of them has to be moved: to the batch, where
that has work for all ranks, and else the smaller operand is replicated. torch makes einsum, the gradients and attention
of these operators.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from math import prod

import torch
from torch.distributed.tensor.placement_types import Placement, Shard

from ... import _torch
from ...sharding.call import Call
from ...sharding.errors import Unfit
from ...sharding.gradient_placements import Hints, Placements
from ...sharding.layout import Layout
from ...sharding.plan_cache import planned
from ...sharding.plan_rule import plan_rule
from ...sharding.registry import Behaviour
from ...sharding.sharding_table import Assignment, P, R, Row, Wanted, choose, input_placements, output_placements
from ..indexing.common import idle, replication_price

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
    operator: _torch.Operator, given: Sequence[Layout], like: Placements | None
) -> tuple[Sequence[Layout], Layout]:
    """Where the operands (first, second and, if any, added) have to be, and where their product then is; it should be
    placed `like` this, if that is known."""
    first, second, added = *given[:2], given[2] if len(given) > 2 else None
    shape = _shape(first, second, added)

    def price(row: Row, mesh_dim: int) -> float:
        """A Partial product is going to be reduced, and what is replicated takes memory, too."""
        size = first.mesh.size(mesh_dim)
        reduced = 2 * prod(shape) * (size - 1) / size if row.outputs[0] == P and like is None else 0
        return replication_price(row, mesh_dim, given) + reduced

    def fits(assignment: Assignment) -> bool:
        """Nothing is moved to a dimension of which half of the ranks would have nothing."""
        return not any(idle(layout, input_placements(assignment, number)) for number, layout in enumerate(given))

    wanted = [] if like is None else [Wanted(like, prod(shape))]
    rows = [new for row in ROWS[len(shape) == 3] for new in _with_added(row, added, shape)]
    named = list(zip(("first", "second", "added"), given, strict=False))
    chosen = choose(_torch.name_of(operator), rows, named, wanted, fits=fits, extra=price)
    operands = [layout.placed(input_placements(chosen, number)) for number, layout in enumerate(given)]
    return operands, first.new(shape, output_placements(chosen, 0))


def _shape(first: Layout, second: Layout, added: Layout | None) -> tuple[int, ...]:
    fitting = len(first.shape) == len(second.shape) in (2, 3) and first.dtype == second.dtype
    fitting = fitting and first.shape[-1] == second.shape[-2] and first.shape[:-2] == second.shape[:-2]
    shape = (*first.shape[:-1], second.shape[-1]) if fitting else ()
    if fitting and added is not None:
        new = len(shape) - len(added.shape)
        fitting = new >= 0 and all(size in (1, shape[new + dim]) for dim, size in enumerate(added.shape))
    if not fitting:
        raise Unfit("the operands do not fit each other",
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


def _like(first: _torch.Spec, second: _torch.Spec) -> Placements | None:
    """In backward, the placements of the factor whose gradient a product is. A forward pass remembers them, but not of
    what is replicated, which a rank may multiply alone."""
    if _torch.in_backward():
        return _factors.recall((first.mesh, tuple(first.shape), tuple(second.shape)))
    sharded = any(isinstance(placement, Shard) for placement in (*first.placements, *second.placements))
    for hint in _hints(first, second) if sharded else ():
        _factors.remember(*hint)
    return None


@planned
def _hints(first: _torch.Spec, second: _torch.Spec) -> tuple[tuple[Hashable, Placements], ...]:
    """The placements of the factors, by the shapes of the products that are their gradients: these should have them."""
    (*batch, m, k), n = first.shape, second.shape[-1]
    # Of a factor whose columns are next to each other in memory torch makes the gradient transposed. That is rarer, so
    # it comes first: where shapes do not tell one from the other, the later one counts.
    return (
        ((first.mesh, (*batch, k, n), (*batch, n, m)), _transposed(first)),
        ((first.mesh, (*batch, n, m), (*batch, m, k)), _transposed(second)),
        ((first.mesh, (*batch, k, m), (*batch, m, n)), second.placements),
        ((first.mesh, (*batch, m, n), (*batch, n, k)), first.placements),
    )


def _transposed(spec: _torch.Spec) -> Placements:
    rows = len(spec.shape) - 2
    flip: dict[Placement, Placement] = {Shard(rows): Shard(rows + 1), Shard(rows + 1): Shard(rows)}
    return tuple(flip.get(placement, placement) for placement in spec.placements)


@plan_rule(aten.mm.default, aten.bmm.default, behaviour=PRODUCT, asks=_like)
def product(operator: _torch.Operator, first: Layout, second: Layout, like: Placements | None) -> Call:
    return Call(*_plan(operator, (first, second), like), operator)


def _forgets(added: _torch.Spec, first: _torch.Spec, second: _torch.Spec, *_: object) -> None:
    _like(first, second)


@plan_rule(aten.addmm.default, aten.baddbmm.default, behaviour=PRODUCT, asks=_forgets)
def product_and_sum(operator: _torch.Operator, added: Layout, first: Layout, second: Layout, *_: object) -> Call:
    """Where the product is Partial one rank adds what is added, or all add their terms of it."""
    (*factors, added), output = _plan(operator, (first, second, added), None)
    pairs = zip(output.placements, added.placements, strict=True)
    once = [mesh_dim for mesh_dim, (at, beside) in enumerate(pairs) if at == P and beside != P]
    adds = all(added.mesh.get_local_rank(mesh_dim) == 0 for mesh_dim in once) if added.present else True

    def run(added: torch.Tensor, first: torch.Tensor, second: torch.Tensor, beta: float, alpha: float) -> torch.Tensor:
        result: torch.Tensor = operator(added, first, second, beta=beta if adds else 0, alpha=alpha)
        return result

    return Call((added, *factors), output, run)
