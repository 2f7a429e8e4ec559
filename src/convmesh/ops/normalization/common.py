"""What all normalisations share: moments of a rank's own values, merged over the ranks that share a set.

The merged moments cost one all-reduce of a few numbers, and then every rank normalises what it has. Backward is the
same with the two sums that its formula needs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.placement_types import Partial, Replicate, Shard

from ... import kernels
from ...comm import (
    Agreed,
    all_gather_summaries,
    all_reduce,
    are_few,
    groups_along,
    lines_along,
    start_reducing,
    sum_over,
)
from ...kernels.batch_norm import Merge
from ...kernels.normalization import Pair
from ...sharding.layout import Layout
from ...sharding.sharding_table import Assignment, Row, Wanted, choose, input_placements
from .._core.cached_tensors import Constant
from ..reductions.plan import counts
from ..reductions.variance import merge_moments

Named = Sequence[tuple[str, Layout | None]]


@dataclass(frozen=True)
class Spread:
    """Over which ranks one set of moments is spread, and which share of its values each of them has."""

    mesh: DeviceMesh
    mesh_dims: tuple[int, ...]
    shares: tuple[Any, ...]  # by rank: a number, or one for every set
    count: int  # values of one set, on all ranks together
    counts: tuple[int, ...] = ()  # by rank, where they are the same for every set

    @staticmethod
    def over(layout: Layout, dims: Sequence[int]) -> Spread:
        mesh_dims = layout.sharded_over(dims)
        found = counts(layout, dims, mesh_dims)
        total = sum(found)
        return Spread(layout.mesh, mesh_dims, tuple(count / max(1, total) for count in found), total, found)

    def compiled(self) -> bool:
        """Whether every rank of the mesh has the compiled kernels: torch's differ from them in the last bits.

        Where moments are merged, all ranks are about to communicate, and so all of them ask.
        """
        return self._have_kernels is not None and self._have_kernels(bool(self.mesh_dims))

    @cached_property
    def _have_kernels(self) -> Agreed | None:
        known = self.mesh.device_type in kernels.COMPILED_FOR
        return Agreed("kernels", kernels.available, self.mesh) if known else None

    def merge(self, mean: torch.Tensor, var: torch.Tensor) -> Pair:
        return merge_moments(mean, var, self.weights, self.mesh, self.mesh_dims)

    def gather(self, own: torch.Tensor) -> torch.Tensor:
        """The moments of each rank, [1 2 C] -> [rank 2 C]; those of all together, [1 2 C], where they are many."""
        if self.mesh_dims and not are_few(own, len(self.shares)):
            return torch.stack(self.merge(*own[0])).unsqueeze(0)
        return all_gather_summaries(own, self._lines)

    @cached_property
    def weights(self) -> Constant:
        return Constant(self.shares)

    def merging(self, moments: torch.Tensor) -> Merge:
        """How what `gather` has brought is merged."""
        return self._of_ranks if len(moments) == len(self.shares) else self._of_all

    @cached_property
    def _of_ranks(self) -> Merge:
        owners = Constant([rank for rank, count in enumerate(self.counts) if count]).on if 0 in self.counts else None
        owned = Constant([count for count in self.counts if count]).on
        return Merge(self.weights.on, len(set(self.shares)) <= 1, self.count, owned, owners)

    @cached_property
    def _of_all(self) -> Merge:
        """Of moments which are those of all ranks together."""
        return Merge(Constant([1.0]).on, True, self.count, Constant([self.count]).on)

    def total(self, own: torch.Tensor, keeps: bool = False) -> torch.Tensor:
        """The sum over all ranks; `own` is lost, unless this `keeps` it."""
        return all_reduce(own, self.mesh, self.mesh_dims) if keeps else sum_over(own, self._groups)

    @cached_property
    def _lines(self) -> list[dist.ProcessGroup]:
        return lines_along(self.mesh, self.mesh_dims)

    @cached_property
    def _groups(self) -> list[dist.ProcessGroup]:
        return groups_along(self.mesh, self.mesh_dims)

    def start_adding_up(self, one: torch.Tensor, other: torch.Tensor) -> Callable[[], Pair]:
        """Start one all-reduce of two sums; return the function that waits for them."""
        finish = start_reducing(torch.stack([one, other]), self.mesh, self.mesh_dims)

        def both() -> Pair:
            first, second = finish()
            return first, second

        return both


@lru_cache(maxsize=256)
def rows(kept: tuple[int, ...], scaled: tuple[tuple[int, int], ...], parameters: int) -> tuple[Row, ...]:
    """(input, *parameters) -> (): parameters are replicated along `kept` dimensions, and sharded along `scaled` ones.

    `scaled` are pairs of a dimension of the input and the parameters' dimension that goes with it.
    """
    full = (Replicate(),) * parameters
    return (
        Row("replicated", (Replicate(), *full), ()),
        *[Row("kept", (Shard(dim), *full), ()) for dim in kept],
        *[Row("scaled", (Shard(dim), *[Shard(other)] * parameters), ()) for dim, other in scaled],
    )


def arrange(
    operator: str, table: Sequence[Row], named: Named, fits: Callable[[Assignment], bool] = lambda assignment: True
) -> tuple[Layout | None, ...]:
    """Where the operands go, at least cost."""
    chosen = choose(operator, table, named, fits=fits)
    return tuple(t and t.placed(input_placements(chosen, number)) for number, (_, t) in enumerate(named))


def parameter_gradient(parameter: Layout, input: Layout, placed: Layout, pending: bool) -> tuple[Layout, Layout]:
    """Where the gradient of a parameter that was `placed` beside the `input` is, and where it goes.

    `pending` if every rank has the sum over its local tensor of the input only.
    """
    sums = tuple(
        Partial() if pending and isinstance(at, Shard) and not isinstance(beside, Shard) else beside
        for at, beside in zip(input.placements, placed.placements, strict=True)
    )
    wanted = Wanted(parameter.placements, prod(parameter.shape))
    return placed.placed(sums), placed.placed(tuple(wanted.becomes(*entry) for entry in enumerate(sums)))
