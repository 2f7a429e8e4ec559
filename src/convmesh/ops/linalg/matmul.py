"""Matrix products and batched matrix products, whichever dimensions are sharded.

The rows of the first operand, the columns of the second and the batch stay sharded. Where the summed dimension is
sharded, the product is Partial(sum): for a Gram matrix over pixels, every rank has the terms of its own pixels. Where
rows and columns are sharded over the same ranks, one of them must be redistributed: to the batch, if that has work for
all ranks; otherwise the smaller operand is replicated. torch decomposes einsum, attention and the gradients into these.
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
from ..indexing.common import leaves_ranks_empty, replication_price

aten = torch.ops.aten

PRODUCT = Behaviour(
    "batch, rows, columns, Partial(sum); the product is Partial(sum) where the summed dimension is sharded",
    "nothing; where rows and columns are sharded over the same ranks, an all-to-all to the batch, or the smaller "
    "operand is replicated",
    "shapes that do not fit",
)  # fmt: skip


def _rows(batched: bool) -> list[Row]:
    """Return the sharding table of `(first [B] M K, second [B] K N) -> [B] M N`."""
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
    operator: _torch.Operator, operands: Sequence[Layout], preferred: Placements | None
) -> tuple[Sequence[Layout], Layout]:
    """Return the layouts of the operands (first, second and, if any, added) and of the product.

    `preferred` are the placements that the product should get, if they are known.
    """
    first, second, added = *operands[:2], operands[2] if len(operands) > 2 else None
    shape = _shape(first, second, added)

    def price(row: Row, mesh_dim: int) -> float:
        """A Partial product must be reduced later, and replicated operands take storage."""
        size = first.mesh.size(mesh_dim)
        reduced = 2 * prod(shape) * (size - 1) / size if row.outputs[0] == P and preferred is None else 0
        return replication_price(row, mesh_dim, operands) + reduced

    def fits(assignment: Assignment) -> bool:
        """Whether nothing is redistributed to a dimension of which half of the ranks or more would have nothing."""
        return not any(
            leaves_ranks_empty(layout, input_placements(assignment, number)) for number, layout in enumerate(operands)
        )

    wanted = [] if preferred is None else [Wanted(preferred, prod(shape))]
    rows = [new for row in ROWS[len(shape) == 3] for new in _with_added(row, added, shape)]
    named = list(zip(("first", "second", "added"), operands, strict=False))
    chosen = choose(_torch.name_of(operator), rows, named, wanted, fits=fits, extra=price)
    placed = [layout.placed(input_placements(chosen, number)) for number, layout in enumerate(operands)]
    return placed, first.new(shape, output_placements(chosen, 0))


def _shape(first: Layout, second: Layout, added: Layout | None) -> tuple[int, ...]:
    """Check the shapes, and return that of the product."""
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
    """Extend a row by the third operand, which is added to the product.

    It is sharded like the product where it has the full dimension; where the product is Partial, it is Partial or
    replicated.
    """
    if added is None:
        return [row]
    new, (output,) = len(shape) - len(added.shape), row.outputs
    alike = isinstance(output, Shard) and output.dim >= new and added.shape[output.dim - new] == shape[output.dim]
    third = Shard(output.dim - new) if alike and isinstance(output, Shard) else R
    return [Row(row.name, (*row.inputs, one), row.outputs) for one in ((R, P) if output == P else (third,))]


_factors = Hints()


def _gradient_hint(first: _torch.Spec, second: _torch.Spec) -> Placements | None:
    """In backward, return the placements of the factor whose gradient this product is; in forward, remember them.

    Nothing is remembered of replicated factors, which a rank may multiply alone.
    """
    if _torch.in_backward():
        return _factors.recall((first.mesh, tuple(first.shape), tuple(second.shape)))
    sharded = any(isinstance(placement, Shard) for placement in (*first.placements, *second.placements))
    for hint in _hints(first, second) if sharded else ():
        _factors.remember(*hint)
    return None


@planned
def _hints(first: _torch.Spec, second: _torch.Spec) -> tuple[tuple[Hashable, Placements], ...]:
    """Return (key, placements) for the products that are gradients of the factors: they should be placed like these."""
    (*batch, m, k), n = first.shape, second.shape[-1]
    # For a column-major factor torch computes the transposed gradient. That is rarer, so it comes first: where the
    # shapes are the same, the later entry counts.
    return (
        ((first.mesh, (*batch, k, n), (*batch, n, m)), _transposed(first)),
        ((first.mesh, (*batch, n, m), (*batch, m, k)), _transposed(second)),
        ((first.mesh, (*batch, k, m), (*batch, m, n)), second.placements),
        ((first.mesh, (*batch, m, n), (*batch, n, k)), first.placements),
    )


def _transposed(spec: _torch.Spec) -> Placements:
    """The placements of the transposed matrices."""
    rows = len(spec.shape) - 2
    flip: dict[Placement, Placement] = {Shard(rows): Shard(rows + 1), Shard(rows + 1): Shard(rows)}
    return tuple(flip.get(placement, placement) for placement in spec.placements)


@plan_rule(aten.mm.default, aten.bmm.default, behaviour=PRODUCT, asks=_gradient_hint)
def product(operator: _torch.Operator, first: Layout, second: Layout, preferred: Placements | None) -> Call:
    return Call(*_plan(operator, (first, second), preferred), operator)


def _remember_only(added: _torch.Spec, first: _torch.Spec, second: _torch.Spec, *_: object) -> None:
    """Remember the factors' placements for backward; this product itself needs no hint."""
    _gradient_hint(first, second)


@plan_rule(aten.addmm.default, aten.baddbmm.default, behaviour=PRODUCT, asks=_remember_only)
def product_and_sum(operator: _torch.Operator, added: Layout, first: Layout, second: Layout, *_: object) -> Call:
    """Plan `beta * added + alpha * first @ second`.

    Where the product is Partial, one rank adds a replicated `added`, or all ranks add their terms of a Partial one.
    """
    (*factors, added), output = _plan(operator, (first, second, added), None)
    pairs = zip(output.placements, added.placements, strict=True)
    once = [mesh_dim for mesh_dim, (at, beside) in enumerate(pairs) if at == P and beside != P]
    adds = all(added.mesh.get_local_rank(mesh_dim) == 0 for mesh_dim in once) if added.present else True

    def run(added: torch.Tensor, first: torch.Tensor, second: torch.Tensor, beta: float, alpha: float) -> torch.Tensor:
        result: torch.Tensor = operator(added, first, second, beta=beta if adds else 0, alpha=alpha)
        return result

    return Call((added, *factors), output, run)
