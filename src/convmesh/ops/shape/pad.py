"""Padding on DTensors: an index map for every padded dimension, and its adjoint for the gradient."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch.distributed.tensor import DTensor

from ... import _torch
from ...geometry import IndexMap, index_map
from ...sharding.call import Call
from ...sharding.errors import Unfit, refuse
from ...sharding.layout import Layout
from ...sharding.plan_rule import plan_rule
from ...sharding.registry import Behaviour, composite
from .._core.index_copy_plan import CopyPlan, Maps, Stock, copy_plan

aten = torch.ops.aten
Pads = tuple[int, ...]
Make = Callable[[int, int, int], IndexMap]

PAD = Behaviour("all dimensions, Partial", "halo, where shard borders move")
PAD_BACKWARD = Behaviour("all dimensions, Partial sums", "gradient of the halo, where shard borders move")


def _each(pads: Pads, dims: int) -> dict[int, tuple[int, int]]:
    """(before, after) by dimension; torch lists the last dimension first."""
    pairs = {dims - 1 - number: (pads[2 * number], pads[2 * number + 1]) for number in range(len(pads) // 2)}
    return {dim: pair for dim, pair in sorted(pairs.items()) if any(pair)}


@plan_rule(aten.constant_pad_nd.default, behaviour=PAD, varies=("value",))
def constant_pad(operator: _torch.Operator, input: Layout, pads: Pads, value: None) -> Call:
    """Its gradient is the same operator with the padding negated."""
    if len(pads) % 2 or len(pads) > 2 * input.ndim:
        raise Unfit("the padding must be pairs, for at most all dimensions", "give pairs")
    pairs = _each(pads, input.ndim)
    for dim, (before, after) in pairs.items():
        size = input.shape[dim]
        if size + min(0, before) < 0 or size + min(0, after) < 0 or size + before + after < 0:
            raise Unfit(f"the padding crops more of dimension {dim} than it has", "crop less")
    maps = {dim: index_map.constant_pad(input.shape[dim], *pair) for dim, pair in pairs.items()}
    return copy_plan(input, maps).call(lambda x, fill: aten.constant_pad_nd.default(x, pads, fill), filled=True)


def _border_maps(input: Layout, make: Make, pads: Pads, batched_dims: int) -> Maps:
    """Padding that repeats values of the input, in the checks that torch makes of it."""
    dims, spatial = input.ndim, batched_dims - 2
    if len(pads) != 2 * spatial or dims not in (batched_dims, batched_dims - 1):
        raise Unfit(f"needs {2 * spatial} numbers and an input of {batched_dims - 1} or {batched_dims} dimensions",
                    "give as many")  # fmt: skip
    if any(size == 0 for size in input.shape[dims - spatial - 1 :]):
        raise Unfit("an input without values has none to repeat", "give values")
    for dim, (before, after) in _each(pads, dims).items():
        size = input.shape[dim]
        if make is index_map.reflection_pad and max(before, after) >= size:
            raise Unfit(f"can reflect less than the {size} of dimension {dim}", "pad less")
        if size + before + after < 1 or size + min(0, before) + min(0, after) < 0:
            raise Unfit(f"nothing of dimension {dim} is left", "crop less")
    return {dim: make(input.shape[dim], *pair) for dim, pair in _each(pads, dims).items()}


def own_pads(plan: CopyPlan, make: Make, pads: Pads) -> Pads | None:
    """The padding by which torch's kernel makes this rank's result from its local tensor; None where there is none, or
    ranks need something of each other.

    A kernel writes a row at a time, where piece by piece columns are written, each number to a cache line of its own.
    """
    empty = 0 in plan.source.local_shape or 0 in plan.output.local_shape
    if plan.remap is None or empty or not all(part.silent for axis in plan.remap.axes for part in axis.plans):
        return None
    found = list(pads)
    for axis in plan.remap.axes:
        before, _ = _each(pads, plan.source.ndim)[axis.dim]
        own, out = axis.plans[0].owned[axis.rank], axis.out
        around = own.start + before - out.start, out.stop - before - own.stop
        mine = tuple(
            replace(piece, out_start=piece.out_start - out.start, in_start=piece.in_start - own.start)
            for piece in axis.map.within(out)
        )
        if make(len(own), *around).pieces != mine:
            return None
        last = 2 * (plan.source.ndim - axis.dim)
        found[last - 2 : last] = around
    return tuple(found)


def _border_pad(spatial: int, kind: str, make: Make) -> None:
    """Declare the rules of one of torch's operators; 1d, 2d and 3d differ in their names only."""
    name = f"{kind}_pad{spatial}d"

    @plan_rule(getattr(aten, name).default, behaviour=PAD)
    def forward(operator: _torch.Operator, input: Layout, pads: Pads) -> Call:
        plan = copy_plan(input, _border_maps(input, make, pads, spatial + 2))
        mine = own_pads(plan, make, pads)
        alone: Stock | None = None if mine is None else lambda x, fill: operator(x, mine)
        return plan.call(lambda x, fill: operator(x, pads), alone=alone)

    @plan_rule(getattr(aten, f"{name}_backward").default, behaviour=PAD_BACKWARD)
    def backward(operator: _torch.Operator, gradient: Layout, input: Layout, pads: Pads) -> Call:
        # The gradient decides where the work is done: it is a copy in reverse, so nothing of it need move first.
        plan = copy_plan(input.placed(gradient.placements), _border_maps(input, make, pads, spatial + 2), ("sum",))
        if plan.output.shape != gradient.shape:
            raise Unfit(f"the output has shape {plan.output.shape}, its gradient {gradient.shape}",
                        "give a gradient of that shape")  # fmt: skip
        shape = plan.source.local_shape

        def run(gy: torch.Tensor, x: torch.Tensor | None, pads: Pads) -> torch.Tensor:
            if plan.remap is not None:
                return plan.remap.adjoint(gy)
            gx: torch.Tensor = operator(gy, gy.new_empty(shape), pads) if gy.numel() else gy.new_zeros(shape)
            return gx

        return Call((plan.output, None), plan.source, run)


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
