"""The layout of a DTensor: mesh, placements, shape, strides and dtype, and what a rank owns of it, as integers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Partial, Placement, Replicate, Shard

from .. import _torch
from ..geometry import Interval, Shards
from ..strides import dense_stride as dense_stride
from ..strides import format_of, same_stride


@dataclass(frozen=True)
class Layout:
    """Shape, strides and dtype of a full tensor, and its placements on a mesh: plans are made from layouts."""

    mesh: DeviceMesh
    placements: tuple[Placement, ...]
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    @staticmethod
    def of(spec: _torch.Spec) -> Layout:
        meta = spec.tensor_meta
        assert meta is not None, "a DTensor's spec knows its shape"
        shape, stride = (tuple(map(_torch.known, numbers)) for numbers in (meta.shape, meta.stride))
        return Layout(spec.mesh, spec.placements, shape, stride, meta.dtype)

    def placed(self, placements: Iterable[Placement]) -> Layout:
        """Return the same tensor with other placements."""
        return Layout(self.mesh, tuple(placements), self.shape, self.stride, self.dtype)

    def new(
        self, shape: Iterable[int], placements: Iterable[Placement] | None = None, dtype: torch.dtype | None = None
    ) -> Layout:
        """Return a contiguous tensor on this mesh; placements and dtype default to those of this one."""
        sizes = tuple(shape)
        at = self.placements if placements is None else tuple(placements)
        return Layout(self.mesh, at, sizes, dense_stride(sizes, torch.contiguous_format), dtype or self.dtype)

    def replicated(self, mesh_dims: Iterable[int] | None = None) -> Layout:
        """Return the layout with Replicate() over these mesh dimensions, or over all."""
        over = range(self.mesh.ndim) if mesh_dims is None else frozenset(mesh_dims)
        return self.placed(Replicate() if m in over else p for m, p in enumerate(self.placements))

    def without_partial(self, *but: str) -> Layout:
        """Replace Partial by Replicate(), except for the reductions `but`, which an operator supports."""
        return self.placed(reduced(p, *but) for p in self.placements)

    def without(self, dims: Iterable[int], keepdim: bool = False) -> Layout:
        """Return a contiguous layout without these dimensions (size 1 with `keepdim`), no longer sharded along them."""
        lost = frozenset(dims)
        sizes = [1 if dim in lost else size for dim, size in enumerate(self.shape)]

        def kept(placement: Placement) -> Placement:
            if not isinstance(placement, Shard):
                return placement
            if placement.dim in lost:
                return Replicate()
            return placement if keepdim else Shard(placement.dim - sum(dim < placement.dim for dim in lost))

        shape = sizes if keepdim else [size for dim, size in enumerate(sizes) if dim not in lost]
        return self.new(shape, map(kept, self.placements))

    def sharded_elsewhere(self, dim: int) -> Layout:
        """Return a layout that is not sharded along `dim`.

        Each mesh dimension over which `dim` was sharded shards the first other dimension that gives most ranks
        something; if there is none, it replicates.
        """
        layout = self
        for mesh_dim in self.sharded_dims.get(dim, ()):
            others = (layout.sharded(mesh_dim, other) for other in range(self.ndim) if other != dim)
            layout = next((one for one in others if not one.mostly_empty(mesh_dim)), layout.replicated((mesh_dim,)))
        return layout

    def mostly_empty(self, mesh_dim: int) -> bool:
        """Whether at least half of the ranks own nothing of the dimension that is sharded over a mesh dimension."""
        placement = self.placements[mesh_dim]
        if not isinstance(placement, Shard):
            return False
        parts = self.shards(placement.dim)
        return 2 * parts.busy <= len(parts) > 1

    def beside(self, other: Layout, dim: int) -> Placement:
        """Return this tensor's placement when it is broadcast against `other`, which is Shard(dim).

        It is sharded alike if it has the full dimension, else replicated.
        """
        own = dim - other.ndim + self.ndim
        return Shard(own) if own >= 0 and self.shape[own] == other.shape[dim] else Replicate()

    def sharded(self, mesh_dim: int, dim: int) -> Layout:
        """Return the layout with Shard(dim) over one mesh dimension, and unchanged placements over the others."""
        return self.placed(Shard(dim) if m == mesh_dim else p for m, p in enumerate(self.placements))

    def typed(self, dtype: torch.dtype) -> Layout:
        """Return the layout with another dtype."""
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
        """The layout with dense strides in its memory format."""
        stride = dense_stride(self.shape, self.memory_format)
        return Layout(self.mesh, self.placements, self.shape, stride, self.dtype)

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @cached_property
    def spec(self) -> _torch.Spec:
        return _torch.shared_spec(_torch.make_spec(self.mesh, self.placements, self.shape, self.stride, self.dtype))

    @cached_property
    def sharded_dims(self) -> dict[int, tuple[int, ...]]:
        """For each sharded tensor dimension, the mesh dimensions over which it is sharded, outermost first."""
        found: dict[int, tuple[int, ...]] = {}
        for mesh_dim, placement in enumerate(self.placements):
            if isinstance(placement, Shard):
                found[placement.dim] = (*found.get(placement.dim, ()), mesh_dim)
        return found

    def shards(self, dim: int) -> Shards:
        """Return the shards of `dim` along the mesh dimensions over which it is sharded."""
        return Shards(self.shape[dim], tuple(self.mesh.size(mesh_dim) for mesh_dim in self.sharded_dims.get(dim, ())))

    def own(self, dim: int) -> Interval:
        """Return the interval of `dim` that this rank owns."""
        return self.part_at(
            dim, {mesh_dim: self.mesh.get_local_rank(mesh_dim) for mesh_dim in self.sharded_dims.get(dim, ())}
        )

    def part_at(self, dim: int, at: Mapping[int, int]) -> Interval:
        """Return the interval of `dim` owned by the rank at these mesh coordinates, 0 where none is given."""
        place = 0
        for mesh_dim in self.sharded_dims.get(dim, ()):
            place = place * self.mesh.size(mesh_dim) + at.get(mesh_dim, 0)
        return self.shards(dim)[place]

    def sharded_over(self, dims: Iterable[int] | None = None) -> tuple[int, ...]:
        """Return the mesh dimensions of more than one rank over which any of `dims`, by default all, is sharded."""
        found = self.sharded_dims if dims is None else dims
        return tuple(sorted(m for dim in found for m in self.sharded_dims.get(dim, ()) if self.mesh.size(m) > 1))

    @cached_property
    def present(self) -> bool:
        """Whether this rank is in the mesh. Ranks outside compute nothing, and return `absent` for each result."""
        return self.mesh.get_coordinate() is not None

    def absent(self, like: torch.Tensor) -> DTensor:
        """Return a DTensor without elements, on the device of `like`: the result on a rank outside of the mesh."""
        local = _torch.local_of(like) if isinstance(like, DTensor) else like
        return _torch.wrap(local.new_empty(0, dtype=self.dtype), self.spec)

    @cached_property
    def adds_once(self) -> bool:
        """Whether this rank is the first along every mesh dimension over which the tensor is Partial(sum).

        That rank adds values that are to be added once; the others add zeros.
        """
        here = self.mesh.get_coordinate()
        return here is not None and not any(here[m] for m, p in enumerate(self.placements) if is_sum(p))

    @cached_property
    def local_shape(self) -> tuple[int, ...]:
        """The shape of this rank's local tensor; outside of the mesh, the one that DTensor gives there."""
        if not self.present:
            return (0,) if self.shape else ()
        return tuple(self.own(dim).size for dim in range(len(self.shape)))

    def wrap(self, local: torch.Tensor) -> DTensor:
        """Wrap a local result as a DTensor, cast to this dtype and made dense in this memory format."""
        if local.dtype != self.dtype:
            local = local.to(self.dtype)
        # Views of a DTensor follow its global strides, so the local ones must agree with them.
        return _torch.wrap(local.contiguous(memory_format=self.memory_format), self.spec)

    def laid(self, local: torch.Tensor) -> torch.Tensor:
        """Return a local tensor that is dense, its dimensions in the order of the strides; itself if it already is."""
        if local.dim() != len(self.shape):
            return local  # the rank is outside of the mesh
        return local.permute(self.memory_order).contiguous().permute(self.back_from_memory_order)

    @cached_property
    def memory_order(self) -> tuple[int, ...]:
        """The dimensions in storage order, outermost first."""
        return tuple(sorted(range(len(self.shape)), key=lambda dim: -self.stride[dim]))

    @cached_property
    def back_from_memory_order(self) -> tuple[int, ...]:
        return tuple(self.memory_order.index(dim) for dim in range(len(self.shape)))

    @cached_property
    def is_contiguous(self) -> bool:
        return same_stride(self.shape, self.stride, dense_stride(self.shape, torch.contiguous_format))

    @cached_property
    def memory_format(self) -> torch.memory_format:
        """channels_last if the strides match it, else contiguous."""
        return format_of(self.shape, self.stride) or torch.contiguous_format


def is_plain(placement: Placement) -> bool:
    """Whether a placement is Replicate, Shard or Partial(sum), the ones that the rules handle."""
    return type(placement) in (Replicate, Shard) or is_sum(placement)


def reduced(placement: Placement, *but: str) -> Placement:
    """Return Replicate() in place of Partial, except for the reductions `but`."""
    kept = type(placement) is Shard or (type(placement) is Partial and placement.reduce_op in but)
    return placement if kept else Replicate()


def is_sum(placement: Placement) -> bool:
    return type(placement) is Partial and placement.reduce_op == "sum"
