"""Tensors that repeat their input: windows (`Tensor.unfold`) and copies (`repeat`).

Along a sharded dimension both are composed of slices and joins, each of which sends elements that change owner.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import reduce
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from ... import _torch
from ...sharding.call import Call, copy_of
from ...sharding.errors import Unfit
from ...sharding.layout import Layout
from ...sharding.plan_rule import Made, plan_rule
from ...sharding.registry import Behaviour
from .._core.tile_plan import check_memory

aten = torch.ops.aten

WINDOWS = Behaviour(
    "all dimensions, Partial(sum)",
    "nothing; if the dimension is sharded, elements that change owner, for each index of a window",
)
REPEAT = Behaviour(
    "all dimensions, Partial(sum)", "nothing; elements that change owner if a repeated dimension is sharded"
)


def _slices_by_position(length: int, size: int, step: int) -> list[tuple[int, int, int]]:
    """Return the slice (start, stop, step) of each position within a window."""
    if not 0 <= size <= length or step < 1:
        raise Unfit(f"no windows of {size}, {step} apart, fit into {length}",
                    "give a size of at most the dimension's, and a positive step")  # fmt: skip
    return [(k, length - size + k + 1, step) for k in range(size)]


@plan_rule(aten.unfold.default, behaviour=WINDOWS, foreign=True)
def unfold(operator: _torch.Operator, input: Layout, dim: int, size: int, step: int) -> Call | Made | None:
    if not input.ndim:
        return None
    dim %= input.ndim
    where = _slices_by_position(input.shape[dim], size, step)
    if dim in input.sharded_dims:
        return lambda input, *how: copy_of(
            aten.stack.default([aten.slice.Tensor(input, dim, *place) for place in where], -1), input,
            (lambda full: operator(full, *how), None),
        )  # fmt: skip
    count = (input.shape[dim] - size) // step + 1
    shape = (*input.shape[:dim], count, *input.shape[dim + 1 :], size)
    stride = (*input.stride[:dim], input.stride[dim] * step, *input.stride[dim + 1 :], input.stride[dim])
    return Call((input,), replace(input, shape=shape, stride=stride), operator, view=True)


@plan_rule(aten.unfold_backward.default, behaviour=WINDOWS)
def unfold_backward(
    operator: _torch.Operator, gradient: Layout, sizes: tuple[int, ...], dim: int, size: int, step: int
) -> Made:
    dim %= len(sizes)
    where = _slices_by_position(sizes[dim], size, step)

    def compose(gradient: DTensor, *_: Any) -> Any:
        if not where:
            return aten.new_zeros.default(gradient, sizes)
        each = [
            aten.slice_backward.default(aten.select.int(gradient, -1, k), sizes, dim, *place)
            for k, place in enumerate(where)
        ]
        return reduce(aten.add.Tensor, each)

    return compose


@plan_rule(aten.repeat.default, behaviour=REPEAT, foreign=True)
def repeat(operator: _torch.Operator, input: Layout, repeats: Sequence[int]) -> Made | None:
    new = len(repeats) - input.ndim
    repeated = [dim for dim in input.sharded_dims if new >= 0 and repeats[new + dim] != 1]
    if not repeated or any(count < 1 for count in repeats):
        return None
    check_memory(input, [count * size for count, size in zip(repeats[new:], input.shape, strict=True)])
    rest = [1 if number - new in repeated else count for number, count in enumerate(repeats)]

    def compose(input: DTensor, repeats: list[int]) -> Any:
        for dim in repeated:
            input = aten.cat.default([input] * repeats[new + dim], dim)
        return _torch.stock(operator, (input, rest), {})

    return compose
