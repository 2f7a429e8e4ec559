"""Distances of all pairs of rows of two tensors: [B* P M] [B* R M] -> [B* P R]"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Partial, Placement, Replicate, Shard

from ... import _torch
from ...sharding.layout import Layout, dense_stride
from ...sharding.plan_cache import planned
from ...sharding.redistribute import layouts_of, move, specs_of
from ...sharding.registry import Behaviour, rule
from ...sharding.sharding_table import Row, choose, input_placements, output_placements

aten = torch.ops.aten
R, P = Replicate(), Partial()

Numbers = tuple[int, ...]
Rest = tuple[tuple[int, Any], ...]
"""Arguments that are no tensors, with their numbers among all."""

DISTANCE = Behaviour("batch, the rows of one of the two", "the rows of the smaller one to all, where both are cut",
)  # fmt: skip


@rule(aten._cdist_forward.default, aten._cdist_backward.default, behaviour=DISTANCE)
def cdist(operator: _torch.Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> DTensor:
    """Both ways: p comes after the two tensors, and in backward the gradient before them and the distances last."""
    values = _torch.arguments(operator, args, kwargs)
    tensors: list[Any] = [value for value in values if isinstance(value, torch.Tensor)]
    specs = specs_of("cdist", [(f"operand {n}", tensor) for n, tensor in enumerate(tensors)])
    order = tuple(number for number, value in enumerate(values) if isinstance(value, torch.Tensor))
    rest = tuple((number, value) for number, value in enumerate(values) if number not in order)
    operands, output = _plan(operator, order, rest, *specs)
    local = [move(tensor, layout).contiguous() for tensor, layout in zip(tensors, operands, strict=True)]
    if output.mesh.get_coordinate() is None:
        return _torch.wrap(local[0], output.spec)
    return _torch.wrap(_called(operator, order, rest, local), output.spec)


def _called(operator: _torch.Operator, order: Numbers, rest: Rest, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    values = dict(zip(order, tensors, strict=True)) | dict(rest)
    result: torch.Tensor = operator(*(values[number] for number in sorted(values)))
    return result


@planned
def _plan(
    operator: _torch.Operator, order: Numbers, rest: Rest, *specs: _torch.Spec
) -> tuple[tuple[Layout, ...], Layout]:
    named = [(f"operand {n}", spec) for n, spec in enumerate(specs)]
    layouts = layouts_of("cdist", named)
    models = [torch.empty(layout.shape, dtype=layout.dtype, device="meta") for layout in layouts]
    shape = tuple(_called(operator, order, rest, models).shape)
    described = [(name, layout) for (name, _), layout in zip(named, layouts, strict=True)]
    chosen = choose("cdist", _rows(layouts, len(shape)), described)
    operands = tuple(layout.placed(input_placements(chosen, n)) for n, layout in enumerate(layouts))
    stride = dense_stride(shape, torch.contiguous_format)
    return operands, Layout(layouts[0].mesh, output_placements(chosen, 0), shape, stride, layouts[0].dtype)


def _rows(layouts: list[Layout], rank: int) -> list[Row]:
    """Of two operands the forward rows, of four (gradient, both, distances) those of the first one's gradient."""

    def row(name: str, *from_the_end: int | None, output: Placement | int) -> Row:
        inputs = [R if at is None else Shard(len(t.shape) - at) for at, t in zip(from_the_end, layouts, strict=True)]
        return Row(name, tuple(inputs), (Shard(rank - output) if isinstance(output, int) else output,))

    forward = len(layouts) == 2
    rows = [Row("replicated", (R,) * len(layouts), (R,))]
    deep = min(len(layout.shape) for layout in layouts)
    for at in range(3, deep + 1):
        if len({layout.shape[-at] for layout in layouts}) == 1:
            rows.append(row("batch", *(at,) * len(layouts), output=at))
    if forward:
        return [*rows, row("rows", 2, None, output=2), row("columns", None, 2, output=1)]
    return [*rows, row("rows", 2, 2, None, 2, output=2), row("columns", 1, None, 2, 1, output=P)]
