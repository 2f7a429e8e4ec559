"""Plans of reductions: where the operand has to be, over which mesh dimensions it is reduced, where the result is."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.placement_types import Partial

from ...comm import all_reduce
from ...sharding.call import Call
from ...sharding.errors import Unfit
from ...sharding.layout import Layout
from .._core.cached_tensors import Numbers

HALF = (torch.float16, torch.bfloat16)


def wide(dtype: torch.dtype) -> torch.dtype:
    """The type to add up in: half precision would lose what it adds."""
    return torch.float32 if dtype in HALF else dtype


@dataclass(frozen=True)
class Reduction:
    """A reduction over `dims` of a tensor of layout `operand`: of each local tensor, and then over the ranks."""

    operand: Layout
    dims: tuple[int, ...]
    keepdim: bool
    output: Layout
    mesh_dims: tuple[int, ...]  # those over which a reduced dimension is sharded: along them results are all-reduced
    counts: tuple[int, ...]  # how many values of one result each rank along these has

    @staticmethod
    def of(
        given: Layout, dim: int | Sequence[int] | None = None, keepdim: bool = False, partial: tuple[str, ...] = ()
    ) -> Reduction:
        """A Partial input stays Partial if the reduction commutes with its `reduce_op`: if that is in `partial`."""
        dims = dim if dim is None else (dim,) if isinstance(dim, int) else tuple(dim)
        rank = given.ndim
        if dims is not None and any(not -max(rank, 1) <= dim < max(rank, 1) for dim in dims):
            raise Unfit(f"the input has no dimensions {dims}", "give dimensions it has")
        # No dimensions mean all of them, as torch has it.
        reduced = tuple(sorted({dim % rank for dim in dims})) if dims and rank else tuple(range(rank))
        operand = given.without_partial(*partial)
        mesh_dims = operand.sharded_over(reduced)
        output = operand.without(reduced, keepdim)
        return Reduction(operand, reduced, keepdim, output, mesh_dims, counts(operand, reduced, mesh_dims))

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

    def check_filled(self) -> None:
        if self.count == 0 and 0 not in self.output.shape:
            raise Unfit("it would reduce over no values", "give an input that has values")

    def combine(self, tensor: torch.Tensor, op: str = "sum") -> torch.Tensor:
        return all_reduce(tensor, self.mesh, self.mesh_dims, op)

    @cached_property
    def partial(self) -> Layout:
        """The layout of the result while it is Partial(sum)."""
        over = self.mesh_dims
        return self.output.placed(Partial() if m in over else p for m, p in enumerate(self.output.placements))

    def call(self, run: Callable[[torch.Tensor], Any], *dtypes: torch.dtype, output: Layout | None = None) -> Call:
        """`run` makes of a local tensor a result, or several, in which the reduced dimensions are left with size 1."""
        lost = () if self.keepdim else self.dims
        layouts = [(output or self.output).typed(dtype) for dtype in dtypes]

        def one(local: torch.Tensor, *_: object) -> torch.Tensor:
            made: torch.Tensor = run(local)
            return made.squeeze(lost) if lost else made

        def several(local: torch.Tensor, *_: object) -> list[torch.Tensor]:
            return [made.squeeze(lost) if lost else made for made in run(local)]

        return Call((self.operand,), layouts, several) if len(layouts) > 1 else Call((self.operand,), layouts[0], one)


def counts(layout: Layout, dims: Sequence[int], mesh_dims: tuple[int, ...]) -> tuple[int, ...]:
    """How many elements along `dims` each rank has, in the order of the ranks along `mesh_dims`."""
    sizes = [layout.mesh.size(mesh_dim) for mesh_dim in mesh_dims]
    found = [1] * prod(sizes)
    for dim in dims:
        over = layout.sharded_dims.get(dim, ())
        steps = [
            prod(layout.mesh.size(inner) for inner in over[over.index(m) + 1 :]) if m in over else 0 for m in mesh_dims
        ]
        owned = [part.size for part in layout.shards(dim)]
        places = [0]
        for size, step in zip(sizes, steps, strict=True):
            places = [place + at * step for place in places for at in range(size)]
        found = [count * owned[place] for count, place in zip(found, places, strict=True)]
    return tuple(found)
