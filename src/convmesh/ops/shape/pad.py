"""Padding DTensors: an index map for every padded dimension, and its adjoint for the gradient."""

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
from .._core.index_copy_plan import CopyPlan, LocalOp, Maps, copy_plan

aten = torch.ops.aten
Pads = tuple[int, ...]
MakeMap = Callable[[int, int, int], IndexMap]

PAD = Behaviour("all dimensions, Partial", "nothing; elements that change owner if a padded dimension is sharded")
PAD_BACKWARD = Behaviour("all dimensions, Partial(sum)", "gradients of the elements that had changed owner")


def _pads_by_dim(pads: Pads, dims: int) -> dict[int, tuple[int, int]]:
    """Return {dim: (before, after)} of the padded dimensions. torch lists the last dimension first."""
    pairs = {dims - 1 - number: (pads[2 * number], pads[2 * number + 1]) for number in range(len(pads) // 2)}
    return {dim: pair for dim, pair in sorted(pairs.items()) if any(pair)}


@plan_rule(aten.constant_pad_nd.default, behaviour=PAD, varies=("value",))
def constant_pad(operator: _torch.Operator, input: Layout, pads: Pads, value: None) -> Call:
    """Plan constant padding. Its gradient is the same operator with the padding negated."""
    if len(pads) % 2 or len(pads) > 2 * input.ndim:
        raise Unfit("the padding must be pairs, for at most all dimensions", "give pairs")
    pairs = _pads_by_dim(pads, input.ndim)
    for dim, (before, after) in pairs.items():
        size = input.shape[dim]
        if size + min(0, before) < 0 or size + min(0, after) < 0 or size + before + after < 0:
            raise Unfit(f"the padding crops more of dimension {dim} than it has", "crop less")
    maps = {dim: index_map.constant_pad(input.shape[dim], *pair) for dim, pair in pairs.items()}
    return copy_plan(input, maps).call(lambda x, fill: aten.constant_pad_nd.default(x, pads, fill), filled=True)


def _border_maps(input: Layout, make: MakeMap, pads: Pads, batched_dims: int) -> Maps:
    """Return the index maps of reflection or replication padding, after the checks that torch makes."""
    dims, spatial = input.ndim, batched_dims - 2
    if len(pads) != 2 * spatial or dims not in (batched_dims, batched_dims - 1):
        raise Unfit(f"needs {2 * spatial} paddings and an input of {batched_dims - 1} or {batched_dims} dimensions",
                    "give two paddings for each spatial dimension")  # fmt: skip
    if any(size == 0 for size in input.shape[dims - spatial - 1 :]):
        raise Unfit("an input without values has none to repeat", "give values")
    for dim, (before, after) in _pads_by_dim(pads, dims).items():
        size = input.shape[dim]
        if make is index_map.reflection_pad and max(before, after) >= size:
            raise Unfit(f"can reflect less than the {size} of dimension {dim}", "pad less")
        if size + before + after < 1 or size + min(0, before) + min(0, after) < 0:
            raise Unfit(f"nothing of dimension {dim} is left", "crop less")
    return {dim: make(input.shape[dim], *pair) for dim, pair in _pads_by_dim(pads, dims).items()}


def local_padding(plan: CopyPlan, make: MakeMap, pads: Pads) -> Pads | None:
    """Return the padding with which torch's kernel computes this rank's result from its local tensor.

    None if there is none, or if ranks need values of each other. The kernel writes whole rows; copying piece by piece
    writes columns, and each element to another cache line.
    """
    empty = 0 in plan.source.local_shape or 0 in plan.output.local_shape
    if plan.copy is None or empty or not all(part.silent for axis in plan.copy.axes for part in axis.plans):
        return None
    local = list(pads)
    for axis in plan.copy.axes:
        before, _ = _pads_by_dim(pads, plan.source.ndim)[axis.dim]
        own, out = axis.plans[0].owned[axis.rank], axis.out
        around = own.start + before - out.start, out.stop - before - own.stop
        pieces = tuple(
            replace(piece, out_start=piece.out_start - out.start, in_start=piece.in_start - own.start)
            for piece in axis.map.within(out)
        )
        if make(len(own), *around).pieces != pieces:
            return None
        last = 2 * (plan.source.ndim - axis.dim)
        local[last - 2 : last] = around
    return tuple(local)


def _border_pad(spatial: int, kind: str, make: MakeMap) -> None:
    """Declare the rules of one kind of padding in 1d, 2d or 3d, which differ only in their names."""
    name = f"{kind}_pad{spatial}d"

    @plan_rule(getattr(aten, name).default, behaviour=PAD)
    def forward(operator: _torch.Operator, input: Layout, pads: Pads) -> Call:
        plan = copy_plan(input, _border_maps(input, make, pads, spatial + 2))
        local_pads = local_padding(plan, make, pads)
        without_exchange: LocalOp | None = None if local_pads is None else lambda x, fill: operator(x, local_pads)
        return plan.call(lambda x, fill: operator(x, pads), without_exchange=without_exchange)

    @plan_rule(getattr(aten, f"{name}_backward").default, behaviour=PAD_BACKWARD)
    def backward(operator: _torch.Operator, gradient: Layout, input: Layout, pads: Pads) -> Call:
        # The gradient decides the placements: it is a copy in reverse, so the gradient need not be redistributed first.
        plan = copy_plan(input.placed(gradient.placements), _border_maps(input, make, pads, spatial + 2), ("sum",))
        if plan.output.shape != gradient.shape:
            raise Unfit(f"the output has shape {plan.output.shape}, its gradient {gradient.shape}",
                        "give a gradient of that shape")  # fmt: skip
        shape = plan.source.local_shape

        def run(gy: torch.Tensor, x: torch.Tensor | None, pads: Pads) -> torch.Tensor:
            if plan.copy is not None:
                return plan.copy.adjoint(gy)
            gx: torch.Tensor = operator(gy, gy.new_empty(shape), pads) if gy.numel() else gy.new_zeros(shape)
            return gx

        return Call((plan.output, None), plan.source, run)


for _spatial in (1, 2, 3):
    _border_pad(_spatial, "reflection", index_map.reflection_pad)
    _border_pad(_spatial, "replication", index_map.replication_pad)


@composite("pad", PAD)
def pad(input: torch.Tensor, pads: list[int], mode: str = "constant", value: float | None = None) -> torch.Tensor:
    """`F.pad`. torch decomposes it into other operators, but writes into views where the padding is circular."""
    if mode == "circular" and isinstance(input, DTensor):
        return _circular(input, pads)
    result: torch.Tensor = _torch.composite(aten.pad.default, (input, pads, mode, value), {})
    return result


def _circular(input: DTensor, pads: list[int]) -> torch.Tensor:
    """Concatenate the ends to the input. As on one device, the result is a contiguous copy."""
    if len(pads) % 2 or (len(pads) // 2 + 2 != input.dim() and len(pads) // 2 + 1 != input.dim()):
        raise refuse("pad (circular)", "the padding must be pairs for all spatial dimensions",
                     (("input", input), ("pad", pads)), "give pairs")  # fmt: skip
    result: torch.Tensor = input.clone(memory_format=torch.contiguous_format)
    for dim, (before, after) in _pads_by_dim(tuple(pads), input.dim()).items():
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
