"""Which part of a global array a rank has, and making sharded tensors from these parts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement, Replicate, Shard

from .. import _torch
from ..sharding.errors import ShardingError, refuse
from ..sharding.layout import Layout, dense_stride

Region = tuple[slice, ...]


class ArrayLike(Protocol):
    """Anything with a shape that gives its parts by slices: tensors, numpy arrays and memory maps, zarr, HDF5."""

    @property
    def shape(self) -> tuple[int, ...]: ...
    def __getitem__(self, region: Region, /) -> Any: ...


def shard(array: ArrayLike, mesh: DeviceMesh, **dims: int) -> DTensor:
    """The DTensor of `array`, cut over the mesh: `shard(image, mesh, h=2, w=3)` cuts dimension 2 over the mesh
    dimension named "h" and 3 over "w"; over mesh dimensions that are not named it is replicated.

    Every rank gives the same array and reads only its own region of it; nothing is sent. The result is a new leaf for
    autograd, which requires a gradient where a given tensor does.
    """
    layout = _layout(tuple(array.shape), mesh, dims)
    if isinstance(array, DTensor):
        raise ShardingError("shard: this is a DTensor already\n  remedy: tensor.redistribute(mesh, placements)")
    if not isinstance(array, torch.Tensor):
        return _wrap(read(array, _region(layout)), layout)
    layout = replace(layout, stride=tuple(array.stride())).dense
    # A tensor's part is a view, and would keep all of the tensor alive.
    tensor = _wrap(read(array, _region(layout)).clone(), layout)
    tensor.requires_grad_(array.requires_grad)
    return tensor


def region(shape: tuple[int, ...] | DTensor, mesh: DeviceMesh | None = None, **dims: int) -> Region:
    """The slices of a global array of this shape that this rank has: `volume[region(volume.shape, mesh, d=0)]`.

    With a DTensor instead of a shape, the slices of what this rank has of it: where its local part belongs in a file.
    """
    if isinstance(shape, DTensor):
        spec = _torch.spec_of(shape)
        if not _torch.plain_order(spec) or any(placement.is_partial() for placement in spec.placements):
            raise refuse("region", "the parts are pending sums, or cut in an unusual order", [("tensor", shape)],
                         "redistribute it to Shard and Replicate placements first")  # fmt: skip
        return _region(Layout.of(spec))
    if mesh is None:
        raise ShardingError("region: a shape needs a mesh\n  remedy: region(shape, mesh, h=2, w=3)")
    return _region(_layout(tuple(shape), mesh, dims))


def from_region(local: Any, shape: tuple[int, ...], mesh: DeviceMesh, **dims: int) -> DTensor:
    """The DTensor of a global `shape` of which this rank has read its `region(shape, mesh, **dims)`."""
    layout = _layout(tuple(shape), mesh, dims)
    part = torch.as_tensor(local)
    if mesh.get_coordinate() is not None and tuple(part.shape) != layout.local_shape:
        raise ShardingError(
            f"from_region: this rank's part of {layout.shape} has shape {layout.local_shape}, not {tuple(part.shape)}\n"
            f"  remedy: read array[convmesh.region({layout.shape}, mesh, {_words(dims)})]"
        )
    return _wrap(part, layout)


def read(array: ArrayLike, where: Region) -> torch.Tensor:
    """A part of any array as a tensor. Only that part is read from a file."""
    if isinstance(array, torch.Tensor):
        return array.detach()[where]
    # Files are mapped read-only, and numpy hands on such memory, which a tensor must not write to.
    return torch.tensor(array[where])


def placements(ndim: int, mesh: DeviceMesh, dims: Mapping[str, int]) -> tuple[Placement, ...]:
    """What `dims` says of a tensor with `ndim` dimensions."""
    names = mesh.mesh_dim_names
    allowed = f"mesh dimension = tensor dimension, e.g. {_example(names, ndim)}"
    if names is None and dims:
        raise ShardingError(
            "shard: the dimensions of this mesh have no names\n"
            '  remedy: init_device_mesh(device, shape, mesh_dim_names=("data", "h", "w"))'
        )
    at: dict[str, int] = {}
    for name, dim in dims.items():
        if name not in (names or ()):
            raise ShardingError(f"shard: the mesh has no dimension {name!r}, only {names}\n  remedy: {allowed}")
        if isinstance(dim, bool) or not isinstance(dim, int) or not -ndim <= dim < ndim:
            raise ShardingError(
                f"shard: {name}={dim!r} is no dimension of a tensor with {ndim} of them, {-ndim} to {ndim - 1}\n"
                f"  remedy: {allowed}"
            )
        if dim % ndim in at.values():
            raise ShardingError(
                f"shard: dimension {dim % ndim} is cut twice, by {_words(dims)}\n"
                f"  remedy: {allowed}; DTensor.from_local takes two Shard placements of one dimension"
            )
        at[name] = dim % ndim
    return tuple(Shard(at[name]) if name in at else Replicate() for name in names or (None,) * mesh.ndim)


def _layout(shape: tuple[int, ...], mesh: DeviceMesh, dims: Mapping[str, int]) -> Layout:
    stride = dense_stride(shape, torch.contiguous_format)
    return Layout(mesh, placements(len(shape), mesh, dims), shape, stride, torch.get_default_dtype())


def _region(layout: Layout) -> Region:
    if layout.mesh.get_coordinate() is None:  # a rank outside of the mesh has nothing
        return tuple(slice(0, 0) for _ in layout.shape)
    return tuple(slice(own.start, own.stop) for own in map(layout.own, range(len(layout.shape))))


def _wrap(part: torch.Tensor, layout: Layout) -> DTensor:
    # Views of a DTensor are made by its global strides, so the local ones must agree with them.
    part = part.to(layout.mesh.device_type).contiguous(memory_format=layout.memory_format)
    return DTensor.from_local(
        part, layout.mesh, layout.placements, run_check=False, shape=torch.Size(layout.shape), stride=layout.stride
    )


def _words(dims: Mapping[str, int]) -> str:
    return ", ".join(f"{name}={dim}" for name, dim in dims.items())


def _example(names: tuple[str, ...] | None, ndim: int) -> str:
    last = (names or ())[-ndim:] if ndim else ()
    return _words({name: ndim - len(last) + number for number, name in enumerate(last)})
