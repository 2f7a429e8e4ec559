"""Where the operand of a reduction has to be, which ranks hold parts of one result, and where that result lies."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from math import prod
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Partial, Placement, Replicate, Shard

from ... import _torch
from ...comm import all_reduce
from ...sharding.errors import refuse
from ...sharding.gradient_placements import remember
from ...sharding.layout import Layout, dense_stride
from ...sharding.plan_cache import planned
from ...sharding.redistribute import layouts_of, move, specs_of
from .._core.cached_tensors import Numbers

HALF = (torch.float16, torch.bfloat16)


def wide(dtype: torch.dtype) -> torch.dtype:
    """The type to add up in: half precision would lose what it adds."""
    return torch.float32 if dtype in HALF else dtype


@dataclass(frozen=True)
class Reduction:
    """A reduction over `dims` of an operand that lies at `operand`; every rank reduces its part, then all of them."""

    operand: Layout
    dims: tuple[int, ...]
    keepdim: bool
    output: Layout
    mesh_dims: tuple[int, ...]  # those that cut a reduced dimension: along them the results are put together
    counts: tuple[int, ...]  # how many values of one result each rank along these has

    @property
    def count(self) -> int:
        return sum(self.counts)

    @cached_property
    def shares(self) -> Numbers:
        """Which part of the values of one result each rank has."""
        return Numbers([count / max(1, self.count) for count in self.counts])

    @property
    def mesh(self) -> DeviceMesh:
        return self.operand.mesh

    def combine(self, tensor: torch.Tensor, op: str = "sum") -> torch.Tensor:
        return all_reduce(tensor, self.mesh, self.mesh_dims, op)

    @cached_property
    def pending(self) -> Layout:
        """Where the result lies as long as the ranks' sums are not added up."""
        cut = self.mesh_dims
        return self.output.placed(tuple(Partial() if m in cut else p for m, p in enumerate(self.output.placements)))

    def wrap(self, result: torch.Tensor, dtype: torch.dtype | None = None, pending: bool = False) -> DTensor:
        """The DTensor of a result that still has the reduced dimensions, of size 1."""
        output = self.pending if pending else self.output
        output = output if dtype is None else output.typed(dtype)
        if not self.keepdim:
            result = result.squeeze(self.dims)
        if result.dtype != output.dtype:
            result = result.to(output.dtype)
        return _torch.wrap(result.contiguous(), output.spec)


@planned
def plan_reduction(
    operator: str, spec: _torch.Spec, dims: tuple[int, ...] | None, keepdim: bool, partial: tuple[str, ...]
) -> Reduction:
    """A Partial input stays Partial if the reduction commutes with its `reduce_op`: if that is in `partial`."""
    (given,) = layouts_of(operator, [("input", spec)])
    rank = len(given.shape)
    if dims is not None and any(not -max(rank, 1) <= dim < max(rank, 1) for dim in dims):
        raise refuse(operator, f"the input has no dimensions {dims}", [("input", given)], "give dimensions it has")
    # No dimensions mean all of them, as torch has it.
    reduced = tuple(sorted({dim % rank for dim in dims})) if dims and rank else tuple(range(rank))
    operand = settled(given, partial)
    mesh_dims = cutting(operand, reduced)
    sizes = [1 if dim in reduced else size for dim, size in enumerate(given.shape)]
    shape = tuple(sizes) if keepdim else tuple(size for dim, size in enumerate(sizes) if dim not in reduced)
    placements = tuple(_reduced(placement, reduced, keepdim) for placement in operand.placements)
    output = Layout(given.mesh, placements, shape, dense_stride(shape, torch.contiguous_format), given.dtype)
    return Reduction(operand, reduced, keepdim, output, mesh_dims, counts(operand, reduced, mesh_dims))


def settled(given: Layout, partial: tuple[str, ...] = ()) -> Layout:
    """Without Partial placements, but for those whose `reduce_op` is in `partial`."""

    def stays(placement: Placement) -> bool:
        return type(placement) is Shard or (type(placement) is Partial and placement.reduce_op in partial)

    return given.placed(tuple(p if stays(p) else Replicate() for p in given.placements))


def cutting(layout: Layout, dims: Sequence[int]) -> tuple[int, ...]:
    """The mesh dimensions over which any of the tensor's `dims` is cut into several parts."""
    return tuple(sorted(m for dim in dims for m in layout.cuts.get(dim, ()) if layout.mesh.size(m) > 1))


def counts(layout: Layout, dims: Sequence[int], mesh_dims: tuple[int, ...]) -> tuple[int, ...]:
    """How many elements along `dims` each rank has, in the order of the ranks along `mesh_dims`."""
    found = []
    for place in product(*(range(layout.mesh.size(mesh_dim)) for mesh_dim in mesh_dims)):
        at = dict(zip(mesh_dims, place, strict=True))
        found.append(prod(layout.part_at(dim, at).size for dim in dims))
    return tuple(found)


def _reduced(placement: Placement, dims: tuple[int, ...], keepdim: bool) -> Placement:
    if not isinstance(placement, Shard):
        return placement
    if placement.dim in dims:
        return Replicate()
    return placement if keepdim else Shard(placement.dim - sum(dim < placement.dim for dim in dims))


def begin(
    operator: str, input: Any, dim: int | Sequence[int] | None, keepdim: bool, partial: tuple[str, ...] = ()
) -> tuple[Reduction, torch.Tensor | None]:
    """The plan of a reduction, and this rank's part of its operand: None on a rank outside of the mesh."""
    (spec,) = specs_of(operator, (("input", input),))
    dims = dim if dim is None else (dim,) if isinstance(dim, int) else tuple(dim)
    plan = plan_reduction(operator, spec, dims, keepdim, partial)
    remember(
        spec
    )  # its gradient is expanded to its shape, or written into zeros; an earlier tensor's place is forgotten
    if plan.mesh.get_coordinate() is None:
        return plan, None
    return plan, move(input, plan.operand)


def absent(input: DTensor, layout: Layout) -> DTensor:
    """What a rank outside of the mesh returns."""
    return _torch.wrap(_torch.local_of(input).new_empty(0, dtype=layout.dtype), layout.spec)


def wrap_dense(local: torch.Tensor, layout: Layout) -> DTensor:
    """A result in the layout's type and memory format."""
    return _torch.wrap(local.to(layout.dtype).contiguous(memory_format=layout.memory_format), layout.spec)
