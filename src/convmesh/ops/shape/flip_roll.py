"""Flipping, rolling and turning DTensors. Each is its own gradient, the other way round."""

from __future__ import annotations

from typing import Any

import torch

from ... import _torch
from ...geometry import index_map
from ...sharding.errors import refuse
from ...sharding.layout import Layout
from ...sharding.registry import Behaviour, rule
from .._core.index_copy_plan import Maps, copy

aten = torch.ops.aten

TURN = Behaviour("all dimensions, Partial sums", "what changes its owner along the turned dimensions")


def flip_maps(layout: Layout, dims: tuple[int, ...]) -> Maps:
    if len({dim % len(layout.shape) for dim in dims}) != len(dims):
        raise refuse("flip", f"dimensions {dims} repeat", (("input", layout),), "name each once")
    return {dim % len(layout.shape): index_map.flipped(layout.shape[dim]) for dim in dims}


@rule(aten.flip.default, behaviour=TURN)
def flip(operator: _torch.Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    input, dims = _torch.arguments(operator, args, kwargs)
    dims = tuple(map(int, dims))
    if input.dim() == 0:
        return _torch.stock(operator, args, kwargs)
    return copy("flip", input, flip_maps, (dims,), lambda x, fill: aten.flip.default(x, dims))


def roll_maps(layout: Layout, shifts: tuple[int, ...], dims: tuple[int, ...]) -> Maps:
    if len(shifts) != len(dims):
        raise refuse("roll", f"{len(shifts)} shifts for {len(dims)} dimensions", (("input", layout),), "give as many")
    total: dict[int, int] = {}
    for shift, dim in zip(shifts, dims, strict=True):
        total[dim % len(layout.shape)] = total.get(dim % len(layout.shape), 0) + shift
    return {dim: index_map.rolled(layout.shape[dim], shift) for dim, shift in sorted(total.items())}


@rule(aten.roll.default, behaviour=TURN)
def roll(operator: _torch.Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    input, shifts, dims = _torch.arguments(operator, args, kwargs)
    shifts, dims = tuple(map(int, shifts)), tuple(map(int, dims or ()))
    if input.dim() == 0:
        return _torch.stock(operator, args, kwargs)
    if not dims:  # over the flattened tensor
        flat = aten.view.default(aten.clone.default(input, memory_format=torch.contiguous_format), [input.numel()])
        return aten.view.default(aten.roll.default(flat, shifts, [0]), list(input.shape))
    return copy("roll", input, roll_maps, (shifts, dims), lambda x, fill: aten.roll.default(x, shifts, dims))


@rule(aten.rot90.default, behaviour=TURN)
def rot90(operator: _torch.Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A quarter turn is a flip of one of the two dimensions, which then change places."""
    input, turns, dims = _torch.arguments(operator, args, kwargs)
    if len(dims) != 2 or (dims[0] - dims[1]) % max(1, input.dim()) == 0:
        raise refuse("rot90", f"cannot turn dimensions {dims}", (("input", input),), "name two different ones")
    first, second = dims
    if turns % 4 == 0:
        return aten.clone.default(input, memory_format=torch.contiguous_format)
    if turns % 4 == 2:
        return aten.flip.default(input, [first, second])
    turned = aten.transpose.int(aten.flip.default(input, [second if turns % 4 == 1 else first]), first, second)
    return aten.clone.default(turned, memory_format=torch.contiguous_format)
