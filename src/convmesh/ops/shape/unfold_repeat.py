"""Tensors that repeat their input: windows side by side (`Tensor.unfold`), and whole copies (`repeat`).

Along a sharded dimension both are made of slices and joins, each of which sends what changes its owner.
"""

from __future__ import annotations

from typing import Any

import torch

from ... import _torch
from ...sharding.errors import refuse
from ...sharding.layout import Layout
from ...sharding.plan_cache import planned
from ...sharding.redistribute import check_placed
from ...sharding.registry import Behaviour, rule
from .._core.tile_plan import ask_for_memory
from .slice_split import sharded, view_of

aten = torch.ops.aten

WINDOWS = Behaviour("all dimensions, Partial sums", "for each place in a window, what changes its owner")
REPEAT = Behaviour("all dimensions, Partial sums", "what changes its owner along a repeated dimension")


def _count(operator: str, input: Any, length: int, size: int, step: int) -> int:
    """How many windows of `size` there are, `step` apart."""
    if not 0 <= size <= length or step < 1:
        raise refuse(operator, f"no windows of {size}, {step} apart, fit into {length}", [("input", input)],
                     "give a size of at most the dimension's, and a positive step")  # fmt: skip
    return (length - size) // step + 1


@planned
def plan_windows(spec: _torch.Spec, dim: int, count: int, size: int, step: int) -> Layout | None:
    """Where windows of a dimension lie that is not sharded; None where only torch's DTensor knows."""
    layout = Layout.of(spec)
    if not layout.present or not _torch.plain_order(spec):
        return None
    shape = (*layout.shape[:dim], count, *layout.shape[dim + 1 :], size)
    stride = (*layout.stride[:dim], layout.stride[dim] * step, *layout.stride[dim + 1 :], layout.stride[dim])
    return Layout(layout.mesh, layout.placements, shape, stride, layout.dtype)


@rule(aten.unfold.default, behaviour=WINDOWS)
def unfold(operator: _torch.Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    input, dim, size, step = _torch.arguments(operator, args, kwargs)
    check_placed("unfold", (("input", input),))
    if not input.dim():
        return _torch.stock(operator, args, kwargs)
    dim %= input.dim()
    count = _count("unfold", input, input.shape[dim], size, step)
    if not sharded(input, dim):
        output = plan_windows(_torch.spec_of(input), dim, count, size, step)
        return _torch.stock(operator, args, kwargs) if output is None else view_of(operator, args, kwargs, output)
    places = [aten.slice.Tensor(input, dim, k, k + (count - 1) * step + 1, step) for k in range(size)]
    return aten.stack.default(places, -1)


@rule(aten.unfold_backward.default, behaviour=WINDOWS)
def unfold_backward(operator: _torch.Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    gradient, sizes, dim, size, step = _torch.arguments(operator, args, kwargs)
    check_placed("unfold_backward", (("grad_output", gradient),))
    dim %= len(sizes)
    count = _count("unfold_backward", gradient, sizes[dim], size, step)
    total = None
    for k in range(size):
        one = aten.select.int(gradient, -1, k)
        part = aten.slice_backward.default(one, sizes, dim, k, k + (count - 1) * step + 1, step)
        total = part if total is None else aten.add.Tensor(total, part)
    return aten.new_zeros.default(gradient, sizes) if total is None else total


@rule(aten.repeat.default, behaviour=REPEAT)
def repeat(operator: _torch.Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    input, repeats = _torch.arguments(operator, args, kwargs)
    new = len(repeats) - input.dim()
    repeated = [dim for dim in range(input.dim()) if sharded(input, dim) and repeats[new + dim] != 1]
    if new < 0 or not repeated or any(count < 1 for count in repeats):
        return _torch.stock(operator, args, kwargs)
    sizes = [count * size for count, size in zip(repeats[new:], input.shape, strict=True)]
    ask_for_memory(Layout.of(_torch.spec_of(input)), sizes)
    for dim in repeated:
        input = aten.cat.default([input] * repeats[new + dim], dim)
    rest = [1 if number - new in repeated else count for number, count in enumerate(repeats)]
    return _torch.stock(operator, (input, rest), {})
