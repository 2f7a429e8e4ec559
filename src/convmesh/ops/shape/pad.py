"""Padding on DTensors: an index map for every padded dimension, and its adjoint for the gradient."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from ... import _torch
from ...geometry import IndexMap, index_map
from ...sharding.errors import refuse
from ...sharding.layout import Layout
from ...sharding.plan_cache import planned
from ...sharding.redistribute import check_placed, move
from ...sharding.registry import Behaviour, composite, rule
from .._core.index_copy_plan import CopyPlan, Maps, Stock, copy, copy_plan, plan_copy

aten = torch.ops.aten
Pads = tuple[int, ...]
Make = Callable[[int, int, int], IndexMap]

PAD = Behaviour("all dimensions, Partial", "halo, where shard borders move")
PAD_BACKWARD = Behaviour("all dimensions, Partial sums", "gradient of the halo, where shard borders move")


def _each(pads: Pads, dims: int) -> dict[int, tuple[int, int]]:
    """(before, after) by dimension; torch lists the last dimension first."""
    pairs = {dims - 1 - number: (pads[2 * number], pads[2 * number + 1]) for number in range(len(pads) // 2)}
    return {dim: pair for dim, pair in sorted(pairs.items()) if any(pair)}


def constant_maps(layout: Layout, pads: Pads) -> Maps:
    named = (("input", layout), ("pad", pads))
    if len(pads) % 2 or len(pads) > 2 * len(layout.shape):
        raise refuse("constant_pad_nd", "the padding must be pairs, for at most all dimensions", named, "give pairs")
    for dim, (before, after) in _each(pads, len(layout.shape)).items():
        size = layout.shape[dim]
        if size + min(0, before) < 0 or size + min(0, after) < 0 or size + before + after < 0:
            raise refuse(
                "constant_pad_nd", f"the padding crops more of dimension {dim} than it has", named, "crop less"
            )
    pairs = _each(pads, len(layout.shape)).items()
    return {dim: index_map.constant_pad(layout.shape[dim], *pair) for dim, pair in pairs}


@rule(aten.constant_pad_nd.default, behaviour=PAD)
def constant_pad(operator: _torch.Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> DTensor:
    """Its gradient is the same operator with the padding negated."""
    input, pads, value = _torch.arguments(operator, args, kwargs)
    pads = tuple(map(int, pads))
    return copy(
        "constant_pad_nd", input, constant_maps, (pads,), lambda x, fill: aten.constant_pad_nd.default(x, pads, fill),
        value,
    )  # fmt: skip


def _border_maps(layout: Layout, operator: str, make: Make, pads: Pads, batched_dims: int) -> Maps:
    """Padding that repeats values of the input, in the checks that torch makes of it."""
    named = (("input", layout), ("padding", pads))
    dims = len(layout.shape)
    spatial = batched_dims - 2
    if len(pads) != 2 * spatial or dims not in (batched_dims, batched_dims - 1):
        raise refuse(operator, f"needs {2 * spatial} numbers and an input of {batched_dims - 1} or {batched_dims} "
                     "dimensions", named, "give as many")  # fmt: skip
    if any(size == 0 for size in layout.shape[dims - spatial - 1 :]):
        raise refuse(operator, "an input without values has none to repeat", named, "give values")
    for dim, (before, after) in _each(pads, dims).items():
        size = layout.shape[dim]
        if make is index_map.reflection_pad and max(before, after) >= size:
            raise refuse(operator, f"can reflect less than the {size} of dimension {dim}", named, "pad less")
        if size + before + after < 1 or size + min(0, before) + min(0, after) < 0:
            raise refuse(operator, f"nothing of dimension {dim} is left", named, "crop less")
    return {dim: make(layout.shape[dim], *pair) for dim, pair in _each(pads, dims).items()}


@planned
def own_pads(spec: _torch.Spec, operator: str, make: Make, pads: Pads, batched_dims: int) -> Pads | None:
    """The padding by which torch's kernel makes this rank's result from its local tensor; None
    where there is none, or ranks need something of each other.

    A kernel writes a row at a time, where piece by piece columns are written, each number to a cache line of its own.
    """
    plan = plan_copy(spec, _border_maps, operator, make, pads, batched_dims)
    empty = 0 in plan.source.local_shape or 0 in plan.output.local_shape
    if plan.remap is None or empty or not all(part.silent for axis in plan.remap.axes for part in axis.plans):
        return None
    found = list(pads)
    for axis in plan.remap.axes:
        before, _ = _each(pads, len(plan.source.shape))[axis.dim]
        own, out = axis.plans[0].owned[axis.rank], axis.out
        around = own.start + before - out.start, out.stop - before - own.stop
        mine = tuple(
            replace(piece, out_start=piece.out_start - out.start, in_start=piece.in_start - own.start)
            for piece in axis.map.within(out)
        )
        if make(len(own), *around).pieces != mine:
            return None
        last = 2 * (len(plan.source.shape) - axis.dim)
        found[last - 2 : last] = around
    return tuple(found)


def _border_pad(spatial: int, kind: str, make: Make) -> None:
    """Declare the rules of one of torch's operators; 1d, 2d and 3d differ in their names only."""
    name = f"{kind}_pad{spatial}d"
    forward_operator = getattr(aten, name).default
    backward_operator = getattr(aten, f"{name}_backward").default

    @planned
    def plan_backward(gradient: _torch.Spec, input: _torch.Spec, pads: Pads) -> tuple[CopyPlan, Layout]:
        placed, source = Layout.of(gradient), Layout.of(input)
        maps = _border_maps(source, f"{name}_backward", make, pads, spatial + 2)
        # The gradient decides where the work is done: it is a copy in reverse, so nothing of it need move first.
        plan = copy_plan(source.placed(placed.placements), maps)
        if plan.output.shape != placed.shape:
            raise refuse(f"{name}_backward", f"the output has shape {plan.output.shape}, its gradient {placed.shape}",
                         (("grad_output", placed), ("input", source)), "give a gradient of that shape")  # fmt: skip
        return plan, plan.source

    @rule(forward_operator, behaviour=PAD)
    def forward(operator: _torch.Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> DTensor:
        input, pads = _torch.arguments(operator, args, kwargs)
        pads = tuple(map(int, pads))
        numbers = (name, make, pads, spatial + 2)

        def alone(spec: _torch.Spec) -> Stock | None:
            mine = own_pads(spec, *numbers)
            return None if mine is None else lambda x, fill: forward_operator(x, mine)

        return copy(name, input, _border_maps, numbers, lambda x, fill: forward_operator(x, pads), alone=alone)

    @rule(backward_operator, behaviour=PAD_BACKWARD)
    def backward(operator: _torch.Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> DTensor:
        gradient, input, pads = _torch.arguments(operator, args, kwargs)
        pads = tuple(map(int, pads))
        check_placed(f"{name}_backward", (("grad_output", gradient), ("input", input)))
        plan, result = plan_backward(_torch.spec_of(gradient), _torch.spec_of(input), pads)
        if not result.present:
            return result.absent(gradient)
        gy = move(gradient, plan.output)
        if plan.remap is not None:
            gx = plan.remap.adjoint(gy)
        elif not gy.numel():
            gx = gy.new_zeros(result.local_shape)
        else:
            gx = backward_operator(gy, gy.new_empty(result.local_shape), pads)
        return result.wrap(gx)


for _spatial in (1, 2, 3):
    _border_pad(_spatial, "reflection", index_map.reflection_pad)
    _border_pad(_spatial, "replication", index_map.replication_pad)


@composite("pad", PAD)
def pad(input: torch.Tensor, pads: list[int], mode: str = "constant", value: float | None = None) -> torch.Tensor:
    """`F.pad`, of which torch makes one operator or another, but writes into views where the padding is circular."""
    if mode == "circular" and isinstance(input, DTensor):
        return _circular(input, pads)
    result: torch.Tensor = _torch.composite(aten.pad.default, (input, pads, mode, value), {})
    return result


def _circular(input: DTensor, pads: list[int]) -> torch.Tensor:
    """Join the ends to the input. On one device, too, the result is contiguous, and a copy."""
    if len(pads) % 2 or (len(pads) // 2 + 2 != input.dim() and len(pads) // 2 + 1 != input.dim()):
        raise refuse("pad (circular)", "the padding must be pairs for all spatial dimensions",
                     (("input", input), ("pad", pads)), "give pairs")  # fmt: skip
    result: torch.Tensor = input.clone(memory_format=torch.contiguous_format)
    for dim, (before, after) in _each(tuple(pads), input.dim()).items():
        size = result.shape[dim]
        left = size + min(0, before) + min(0, after)
        if before > left or after > left or left < 0:
            raise refuse("pad (circular)", f"the padding wraps around dimension {dim} more than once, or crops it all",
                         (("input", input), ("pad", pads)), "pad less")  # fmt: skip
        kept = result.narrow(dim, max(0, -before), left)
        ends = [kept.narrow(dim, left - before, before)] if before > 0 else []
        ends += [kept]
        ends += [kept.narrow(dim, 0, after)] if after > 0 else []
        result = torch.cat(ends, dim)
    return result
