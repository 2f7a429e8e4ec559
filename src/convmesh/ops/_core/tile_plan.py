"""Planning a tiled operator: the layouts of its operands and its result, and this rank's tile."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Partial, Placement, Replicate, Shard

from ... import _torch
from ...geometry import Dependence
from ...sharding.call import Call, Moved
from ...sharding.layout import Layout, dense_stride, is_sum
from ...sharding.redistribute import redistribute_local
from ...sharding.sharding_table import Row, Wanted, choose, input_placements, output_placements
from ...strides import usual
from .tiles import Tiling

R, P = Replicate(), Partial()
Dependences = Mapping[int, Dependence]  # by tensor dimension


@dataclass(frozen=True)
class TiledPlan:
    """Layouts of the operands, of the computed result and of the wanted one, and this rank's tile."""

    operands: tuple[Layout, ...]
    computed: Layout
    wanted: Layout
    tiling: Tiling | None  # None on a rank outside of the mesh, which does not run the call

    @property
    def fields(self) -> tuple[tuple[Layout, ...], Layout, Layout, Tiling | None]:
        """All fields as a tuple, for subclasses that add more."""
        return self.operands, self.computed, self.wanted, self.tiling

    def finish(self, local: torch.Tensor) -> DTensor:
        """Return the DTensor of a computed local result, redistributed to the wanted layout."""
        same = self.computed is self.wanted
        local = usual(local, self.wanted.stride) if same else redistribute_local(local, self.computed, self.wanted)
        return _torch.wrap(local.contiguous(memory_format=self.wanted.memory_format), self.wanted.spec)

    def call(self, run: Callable[..., Any], *unused: None) -> Call:
        """Return the `Call` of a rule with one result: `run(tiling, *arguments)`.

        `unused` has a None for each tensor after the first that only matters for its layout; it is not redistributed.
        """
        operands = *self.operands[:1], *unused, *self.operands[1:]
        return Call(operands, Moved(self.computed, self.wanted), partial(run, self.tiling))

    def outside(self, like: DTensor) -> DTensor:
        """Return the empty result of a rank outside of the mesh."""
        return _torch.wrap(_torch.local_of(like).new_empty(0, dtype=self.wanted.dtype), self.wanted.spec)


def check_memory(source: Layout, shape: Sequence[int]) -> None:
    """Raise torch's out-of-memory error now if a result of `shape`, sharded like `source`, does not fit.

    Called before planning, since a plan stores data for every index of a rank.
    """
    stride = dense_stride(tuple(shape), torch.contiguous_format)
    result = Layout(source.mesh, source.placements, tuple(shape), stride, source.dtype)
    torch.empty(result.local_shape, dtype=source.dtype, device=source.mesh.device_type)


def plan_targets(source: Layout, shape: tuple[int, ...], dependences: Dependences, linear: bool) -> TiledPlan:
    """Plan sources -> targets of `shape`. Shards stay where they are; Partial(sum) stays if the operator is linear."""

    def kept(placement: Placement) -> Placement:
        return placement if isinstance(placement, Shard) or (linear and is_sum(placement)) else R

    placements = tuple(kept(placement) for placement in source.placements)
    moved = source.placed(placements)
    target = Layout(source.mesh, placements, shape, dense_stride(shape, source.memory_format), source.dtype)
    return TiledPlan((moved,), target, target, _tiling(moved, source.shape, shape, dependences))


def plan_sources(
    operator: str, named: Sequence[tuple[str, Layout]], source: Layout, dependences: Dependences
) -> TiledPlan:
    """Plan the targets' gradient (and indices, if `named` has them) -> the sources' gradient, which is linear in it."""
    count = len(named)
    rows = [
        Row("replicated", (R,) * count, (R,)),
        *[Row("sharded", (Shard(dim),) * count, (Shard(dim),)) for dim in range(len(source.shape))],
        Row("sum of gradients", (P, *(R,) * (count - 1)), (P,)),
    ]
    preferred = Wanted(source.placements, prod(source.shape))
    chosen = choose(operator, rows, named, [preferred])
    placements = output_placements(chosen, 0)
    computed = source.dense.typed(named[0][1].dtype).placed(placements)
    return TiledPlan(
        tuple(layout.placed(input_placements(chosen, number)) for number, (_, layout) in enumerate(named)),
        computed,
        computed.placed(tuple(preferred.becomes(*entry) for entry in enumerate(placements))),
        _tiling(computed, source.shape, named[0][1].shape, dependences),
    )


def _tiling(layout: Layout, sources: Sequence[int], targets: Sequence[int], dependences: Dependences) -> Tiling | None:
    return None if layout.mesh.get_coordinate() is None else Tiling.of(layout, sources, targets, dependences)
