"""What a convolution or a pooling reads of other ranks' shards: the least that has to be sent for it."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from math import prod
from typing import Any, NamedTuple

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from .. import _torch
from ..geometry import Convolution, Interval, Pooling, ShardedDependence, Window
from .trace import Phase

aten = torch.ops.aten
_POOLS = {
    aten.max_pool2d_with_indices.default: 2, aten.max_pool3d_with_indices.default: 3,
    aten.avg_pool2d.default: 2, aten.avg_pool3d.default: 3,
}  # fmt: skip


class Side(NamedTuple):
    """A dimension of the input of a layer: what a rank owns of it, and what it reads; `ranks` share it."""

    size: int
    ranks: int
    owned: Interval
    read: Interval


class _Line(NamedTuple):
    """A side, and how much of what the rank owns of it all ranks read, and the rank itself."""

    side: Side
    by_all: int
    by_itself: int


class Need(NamedTuple):
    """One call of an operator, and the bytes that this rank has to send for it at least."""

    layer: str
    phase: Phase
    least: int
    sides: tuple[Side, ...]  # of the spatial dimensions of what is read


def need(func: Any, args: Sequence[Any], layer: str, phase: Phase) -> Need | None:
    """Return what a call needs, or None if the operator has no window. `args` are DTensors, so others' reads are
    known."""
    if func is aten.convolution.default and _is_plain(args[0]):
        input, weight, _, *geometry = args
        plans = _convolution(input, weight, geometry)
        return Need(layer, phase, plans.forward(input), plans.sides(input))
    if func is aten.convolution_backward.default and _is_plain(args[1]) and _is_plain(args[0]):
        gradient, input, weight, _, *geometry, mask = args
        plans = _convolution(input, weight, geometry)
        back, again = plans.backward(gradient), plans.forward(input)
        # Both gradients come from the halo of the output's gradient; the weight's alone, from that of either.
        return Need(layer, phase, back if mask[0] else min(back, again) if mask[1] else 0, plans.sides(input))
    if func in _POOLS and _is_plain(args[0]):
        plans = _pooling(_POOLS[func], "max" in func.name(), args[0], *args[1:])
        return Need(layer, phase, plans.forward(args[0]), plans.sides(args[0]))
    return None


def _is_plain(tensor: Any) -> bool:
    """Whether a tensor is a DTensor whose shards are contiguous."""
    kinds = (Shard, Replicate, Partial)
    return isinstance(tensor, DTensor) and all(type(placement) in kinds for placement in tensor.placements)


def _convolution(input: torch.Tensor, weight: torch.Tensor, geometry: Sequence[Any]) -> _Plans:
    convolution = Convolution.of(weight.dim() - 2, *geometry)
    sizes, kernel = tuple(input.shape[-(weight.dim() - 2) :]), tuple(weight.shape[2:])
    output = convolution.output_size(sizes, kernel)
    fine, coarse = (output, sizes) if convolution.transposed else (sizes, output)
    return _Plans(convolution.windows(kernel), fine, coarse, convolution.transposed)


def _pooling(
    spatial: int, of_max: bool, input: torch.Tensor, kernel: Any, stride: Any = (), padding: Any = (0,), *others: Any
) -> _Plans:
    """Return the plans of a pooling. A max pooling has a dilation before what both kinds have: whether sizes round
    up."""
    dilation, ceil = (*others, *((1,), False)[len(others) :])[:2] if of_max else ((1,), bool(others and others[0]))
    pooling, sizes = Pooling.of(spatial, kernel, stride, padding, dilation, ceil), tuple(input.shape[-spatial:])
    return _Plans(pooling.windows, sizes, pooling.target_size(sizes), False)


class _Plans(NamedTuple):
    """A window along each spatial dimension, and the sizes on its two sides; transposed, the input is the coarse."""

    windows: tuple[Window, ...]
    fine: tuple[int, ...]
    coarse: tuple[int, ...]
    transposed: bool

    def forward(self, input: DTensor) -> int:
        """Return the bytes of the input that this rank sends."""
        return self._sent(input, self.transposed)

    def backward(self, gradient: DTensor) -> int:
        return self._sent(gradient, not self.transposed)

    def sides(self, input: DTensor) -> tuple[Side, ...]:
        return tuple(line.side for line in self._along(input, self.transposed))

    def _sent(self, tensor: DTensor, coarse: bool) -> int:
        """Return bytes: a box of what a rank owns goes to each other rank that reads it."""
        lines = self._along(tensor, coarse)
        local = _torch.slot_of(tensor)
        rest: int = prod(local.shape[: local.dim() - len(lines)])
        element: int = local.element_size()
        return (prod(line.by_all for line in lines) - prod(line.by_itself for line in lines)) * rest * element

    def _along(self, tensor: DTensor, coarse: bool) -> list[_Line]:
        first = tensor.dim() - len(self.windows)
        return [
            _reads(window, fine, small, coarse, *_line(tensor.device_mesh, tensor.placements, first + number))
            for number, (window, fine, small) in enumerate(zip(self.windows, self.fine, self.coarse, strict=True))
        ]


def _line(mesh: DeviceMesh, placements: Sequence[Any], dim: int) -> tuple[tuple[int, ...], int]:
    """Return the sizes of the mesh dimensions that shard a dimension, and this rank's place among their ranks."""
    sizes, place = [], 0
    for at, (placement, size) in enumerate(zip(placements, mesh.shape, strict=True)):
        if isinstance(placement, Shard) and placement.dim == dim:
            sizes.append(size)
            place = place * size + mesh.get_local_rank(at)
    return tuple(sizes), place


@lru_cache(100_000)
def _reads(window: Window, fine: int, coarse: int, of_coarse: bool, ranks: tuple[int, ...], rank: int) -> _Line:
    both = ShardedDependence(window, fine, coarse, ranks)
    plan = both.target_plan if of_coarse else both.source_plan
    own, inside = plan.owned[rank], Interval(0, plan.size)
    parts = [part & inside for part in plan.needed.parts(rank)]
    itself = sum((part & own).size for part in parts)
    sent = sum(part.size for _, part in plan.sends(rank))
    read = Interval(min(part.start for part in parts), max(part.stop for part in parts))
    return _Line(Side(plan.size, prod(ranks), own, read), itself + sent, itself)
