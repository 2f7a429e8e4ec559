"""Plans of reductions: the operand's layout, the mesh dimensions over which it is reduced, and the result's layout."""

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
from .._core.cached_tensors import Constant

HALF = (torch.float16, torch.bfloat16)


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which sums are accumulated: float32 for half precision, which would lose accuracy."""
    return torch.float32 if dtype in HALF else dtype


@dataclass(frozen=True)
class Reduction:
    """A reduction over `dims` of a tensor of layout `operand`: of each local tensor, then over the ranks."""

    operand: Layout
    dims: tuple[int, ...]
    keepdim: bool
    output: Layout
    mesh_dims: tuple[int, ...]  # those that shard a reduced dimension: results are all-reduced over them
    counts: tuple[int, ...]  # how many values each rank along these contributes to one result

    @staticmethod
    def of(
        input: Layout, dim: int | Sequence[int] | None = None, keepdim: bool = False, partial: tuple[str, ...] = ()
    ) -> Reduction:
        """Plan a reduction. A Partial input stays Partial if its `reduce_op` is in `partial`: the two must commute."""
        dims = dim if dim is None else (dim,) if isinstance(dim, int) else tuple(dim)
        rank = input.ndim
        if dims is not None and any(not -max(rank, 1) <= dim < max(rank, 1) for dim in dims):
            raise Unfit(f"the input has no dimensions {dims}", "give dimensions it has")
        # As in torch, no dimensions mean all of them.
        reduced = tuple(sorted({dim % rank for dim in dims})) if dims and rank else tuple(range(rank))
        operand = input.without_partial(*partial)
        mesh_dims = operand.sharded_over(reduced)
        output = operand.without(reduced, keepdim)
        return Reduction(operand, reduced, keepdim, output, mesh_dims, counts(operand, reduced, mesh_dims))

    @property
    def count(self) -> int:
        """How many values one result is made of."""
        return sum(self.counts)

    @cached_property
    def shares(self) -> Constant:
        """Each rank's fraction of the values of one result."""
        return Constant([count / max(1, self.count) for count in self.counts])

    @property
    def mesh(self) -> DeviceMesh:
        return self.operand.mesh

    def check_not_empty(self) -> None:
        """Refuse to reduce over no values."""
        if self.count == 0 and 0 not in self.output.shape:
            raise Unfit("it would reduce over no values", "give an input that has values")

    def combine(self, tensor: torch.Tensor, op: str = "sum") -> torch.Tensor:
        """All-reduce the ranks' partial results."""
        return all_reduce(tensor, self.mesh, self.mesh_dims, op)

    @cached_property
    def partial(self) -> Layout:
        """The layout of the result while it is Partial(sum)."""
        over = self.mesh_dims
        return self.output.placed(Partial() if m in over else p for m, p in enumerate(self.output.placements))

    def call(self, run: Callable[[torch.Tensor], Any], *dtypes: torch.dtype, output: Layout | None = None) -> Call:
        """Return a `Call` of `run`: local tensor -> one or more results, in which reduced dimensions have size 1."""
        removed = () if self.keepdim else self.dims
        layouts = [(output or self.output).typed(dtype) for dtype in dtypes]

        def one_result(local: torch.Tensor, *_: object) -> torch.Tensor:
            result: torch.Tensor = run(local)
            return result.squeeze(removed) if removed else result

        def several_results(local: torch.Tensor, *_: object) -> list[torch.Tensor]:
            return [result.squeeze(removed) if removed else result for result in run(local)]

        if len(layouts) > 1:
            return Call((self.operand,), layouts, several_results)
        return Call((self.operand,), layouts[0], one_result)


def counts(layout: Layout, dims: Sequence[int], mesh_dims: tuple[int, ...]) -> tuple[int, ...]:
    """Return how many elements each rank has along `dims`, in the order of the ranks along `mesh_dims`."""
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
