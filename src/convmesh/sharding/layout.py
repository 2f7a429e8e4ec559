"""Where the parts of a DTensor lie, as integers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.placement_types import Partial, Placement, Replicate, Shard

from .. import _torch
from ..geometry import Interval, Shards
from ..strides import dense_stride as dense_stride
from ..strides import format_of


@dataclass(frozen=True)
class Layout:
    """A global tensor on a mesh: what plans are made of."""

    mesh: DeviceMesh
    placements: tuple[Placement, ...]
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    @staticmethod
    def of(spec: _torch.Spec) -> Layout:
        meta = spec.tensor_meta
        assert meta is not None, "a DTensor's spec knows its shape"
        return Layout(spec.mesh, spec.placements, tuple(meta.shape), tuple(meta.stride), meta.dtype)

    def placed(self, placements: tuple[Placement, ...]) -> Layout:
        return Layout(self.mesh, placements, self.shape, self.stride, self.dtype)

    def typed(self, dtype: torch.dtype) -> Layout:
        """Like this one, of another type."""
        if dtype == self.dtype:
            return self
        if dtype not in self._typed:
            self._typed[dtype] = Layout(self.mesh, self.placements, self.shape, self.stride, dtype)
        return self._typed[dtype]

    @cached_property
    def _typed(self) -> dict[torch.dtype, Layout]:
        return {}

    @cached_property
    def dense(self) -> Layout:
        """Like this one, in new memory without gaps."""
        stride = dense_stride(self.shape, self.memory_format)
        return Layout(self.mesh, self.placements, self.shape, stride, self.dtype)

    @cached_property
    def spec(self) -> _torch.Spec:
        return _torch.make_spec(self.mesh, self.placements, self.shape, self.stride, self.dtype)

    @cached_property
    def cuts(self) -> dict[int, tuple[int, ...]]:
        """The mesh dimensions over which each sharded tensor dimension is cut, outermost first."""
        found: dict[int, tuple[int, ...]] = {}
        for mesh_dim, placement in enumerate(self.placements):
            if isinstance(placement, Shard):
                found[placement.dim] = (*found.get(placement.dim, ()), mesh_dim)
        return found

    def shards(self, dim: int) -> Shards:
        """What each rank along the cut of `dim` owns of it."""
        return Shards(self.shape[dim], tuple(self.mesh.size(mesh_dim) for mesh_dim in self.cuts.get(dim, ())))

    def own(self, dim: int) -> Interval:
        """What this rank owns of `dim`."""
        return self.part_at(dim, {mesh_dim: self.mesh.get_local_rank(mesh_dim) for mesh_dim in self.cuts.get(dim, ())})

    def part_at(self, dim: int, at: Mapping[int, int]) -> Interval:
        """What the rank at these places along the mesh dimensions (the first, where nothing is said) owns of `dim`."""
        place = 0
        for mesh_dim in self.cuts.get(dim, ()):
            place = place * self.mesh.size(mesh_dim) + at.get(mesh_dim, 0)
        return self.shards(dim)[place]

    @cached_property
    def local_shape(self) -> tuple[int, ...]:
        if self.mesh.get_coordinate() is None:
            return (0,) if self.shape else ()  # what DTensor gives a rank outside of the mesh
        return tuple(self.own(dim).size for dim in range(len(self.shape)))

    def laid(self, part: torch.Tensor) -> torch.Tensor:
        """A rank's part without gaps, in memory in the order of the strides: itself, where it lies so."""
        if part.dim() != len(self.shape):
            return part  # the rank is outside of the mesh
        return part.permute(self.memory_order).contiguous().permute(self.back_from_memory_order)

    @cached_property
    def memory_order(self) -> tuple[int, ...]:
        """The dimensions, outermost first."""
        return tuple(sorted(range(len(self.shape)), key=lambda dim: -self.stride[dim]))

    @cached_property
    def back_from_memory_order(self) -> tuple[int, ...]:
        return tuple(self.memory_order.index(dim) for dim in range(len(self.shape)))

    @cached_property
    def memory_format(self) -> torch.memory_format:
        """channels_last where the strides say so, else contiguous."""
        return format_of(self.shape, self.stride) or torch.contiguous_format


def is_plain(placement: Placement) -> bool:
    """Replicate, Shard, or a pending sum: what the rules of this library speak of."""
    return type(placement) in (Replicate, Shard) or is_sum(placement)


def is_sum(placement: Placement) -> bool:
    return type(placement) is Partial and placement.reduce_op == "sum"
