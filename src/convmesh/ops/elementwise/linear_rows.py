"""Elementwise operators on Partial tensors: which operands may stay Partial because the operator is linear in them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from torch.distributed.tensor.placement_types import Partial

from ... import _torch
from ...sharding.layout import Layout
from ...sharding.sharding_table import R, Row

# By operator: the groups of arguments in which it is jointly linear while all others are replicated.
FIRST_ONLY = ((0,),)
LINEAR: dict[str, tuple[tuple[int, ...], ...]] = {
    "clone": FIRST_ONLY, "_to_copy": FIRST_ONLY, "neg_": FIRST_ONLY, "copy_": ((0, 1),),
    "div.Tensor": FIRST_ONLY, "div_.Tensor": FIRST_ONLY, "div_.Scalar": FIRST_ONLY,
    "mul.Tensor": ((0,), (1,)), "mul_.Tensor": FIRST_ONLY, "mul_.Scalar": FIRST_ONLY,
    "add.Tensor": ((0, 1),), "sub.Tensor": ((0, 1),), "add_.Tensor": ((0, 1),), "sub_.Tensor": ((0, 1),),
    "rsub.Tensor": ((0, 1),), "where.self": ((1, 2),), "lerp": ((0, 1),), "lerp_": ((0, 1),),
    "addcmul": ((0, 1), (0, 2)), "addcmul_": ((0, 1), (0, 2)), "addcdiv": ((0, 1),), "addcdiv_": ((0, 1),),
}  # fmt: skip


@dataclass(frozen=True)
class PartialRow(Row):
    """A row with a Partial result. Only the first rank adds the operands `first_rank_only`; the others use zeros."""

    first_rank_only: tuple[int, ...] = ()


def linear_rows(
    operator: _torch.Operator, operands: Sequence[Layout | None], kwargs: Mapping[str, Any], count: int
) -> list[Row]:
    """Return the rows in which operands stay Partial because the operator is linear in them.

    A replicated operand beside a Partial one is a term of the sum: added on every rank for averages, on the first rank
    for sums. That is only allowed if the Partial operand has the result's size (`count`), since the result is reduced
    later.
    """
    name = operator._schema.name.removeprefix("aten::")
    groups = LINEAR.get(name) or LINEAR.get(f"{name}.{operator._overloadname}", ())
    if name.endswith("_backward"):
        groups = FIRST_ONLY  # a gradient is linear in the gradient that it is made of
    dtype = kwargs.get("dtype")
    if dtype is not None and not (dtype.is_floating_point or dtype.is_complex):
        groups = ()  # rounding is not linear
    rows: list[Row] = []
    for kind in ("sum", "avg"):
        for group in groups:
            layouts = [operands[number] if number < len(operands) else None for number in group]
            sizes = {number: prod(layout.shape) for number, layout in zip(group, layouts, strict=True) if layout}
            if len(sizes) < len(group):
                continue
            partial = [group, *((number,) for number in group if sizes[number] == count and "copy_" not in name)]
            for kept in partial if len(group) > 1 else partial[:1]:
                inputs = tuple(Partial(kind) if number in kept else R for number in range(len(operands)))
                first_rank_only = tuple(number for number in group if number not in kept and kind == "sum")
                rows.append(PartialRow(f"Partial({kind})", inputs, (Partial(kind),), first_rank_only))
    return rows
