"""Flipping, rolling and rotating DTensors. The gradient of each is the same operator in reverse."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor

from ... import _torch
from ...geometry import index_map
from ...sharding.call import Call
from ...sharding.errors import Unfit
from ...sharding.layout import Layout
from ...sharding.plan_rule import Made, plan_rule
from ...sharding.registry import Behaviour
from .._core.index_copy_plan import copy_plan

aten = torch.ops.aten

TURN = Behaviour("all dimensions, Partial(sum)", "nothing; elements that change owner along sharded dimensions")


@plan_rule(aten.flip.default, behaviour=TURN)
def flip(operator: _torch.Operator, input: Layout, dims: tuple[int, ...]) -> Call | None:
    if not input.ndim:
        return None
    if len({dim % input.ndim for dim in dims}) != len(dims):
        raise Unfit(f"dimensions {dims} repeat", "name each once")
    maps = {dim % input.ndim: index_map.flipped(input.shape[dim]) for dim in dims}
    return copy_plan(input, maps).call(lambda x, fill: aten.flip.default(x, dims))


@plan_rule(aten.roll.default, behaviour=TURN)
def roll(
    operator: _torch.Operator, input: Layout, shifts: tuple[int, ...], dims: tuple[int, ...]
) -> Made | Call | None:
    if not input.ndim:
        return None
    if not dims:
        return _roll_flattened
    if len(shifts) != len(dims):
        raise Unfit(f"{len(shifts)} shifts for {len(dims)} dimensions", "give as many shifts as dimensions")
    total: dict[int, int] = {}
    for shift, dim in zip(shifts, dims, strict=True):
        total[dim % input.ndim] = total.get(dim % input.ndim, 0) + shift
    maps = {dim: index_map.rolled(input.shape[dim], shift) for dim, shift in sorted(total.items())}
    return copy_plan(input, maps).call(lambda x, fill: aten.roll.default(x, shifts, dims))


def _roll_flattened(input: DTensor, shifts: list[int], dims: list[int]) -> Any:
    flat = aten.view.default(aten.clone.default(input, memory_format=torch.contiguous_format), [input.numel()])
    return aten.view.default(aten.roll.default(flat, shifts, [0]), list(input.shape))


@plan_rule(aten.rot90.default, behaviour=TURN)
def rot90(operator: _torch.Operator, input: Layout, turns: int, dims: tuple[int, ...]) -> Made:
    if len(dims) != 2 or (dims[0] - dims[1]) % max(1, input.ndim) == 0:
        raise Unfit(f"cannot rotate in the plane of dimensions {dims}", "name two different ones")
    return _rotated


def _rotated(input: DTensor, turns: int, dims: list[int]) -> Any:
    """Rotate the input by `turns` quarter turns. One is a flip of one of the two dimensions, then a transpose."""
    first, second = dims
    if turns % 4 == 0:
        return aten.clone.default(input, memory_format=torch.contiguous_format)
    if turns % 4 == 2:
        return aten.flip.default(input, [first, second])
    turned = aten.transpose.int(aten.flip.default(input, [second if turns % 4 == 1 else first]), first, second)
    return aten.clone.default(turned, memory_format=torch.contiguous_format)
