"""The region of a global array that a rank owns, and sharded tensors made from such regions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement, Replicate, Shard
from torch.utils._pytree import tree_map_only

from .. import _torch
from ..api import enable_unless_told
from ..sharding.errors import ShardingError, refuse
from ..sharding.layout import Layout, dense_stride
from ..sharding.redistribute import check_one_rank
from .arrays import ArrayLike, Region, as_tensor, kind_of, read, sample
from .same_data import compare

Values = TypeVar("Values")


def shard(array: ArrayLike, mesh: DeviceMesh, **dims: int) -> DTensor:
    """Make a sharded DTensor from an array that every rank can read.

    Each rank reads its own slice of the array. Nothing is sent, except small checks that all ranks gave the same array.

    Args:
        array: The full array, the same on every rank: a tensor, a numpy array or memory map, a zarr or HDF5 array. From
            a file, a rank reads only its slice.
        mesh: A mesh whose dimensions have names.
        **dims: `mesh dimension = tensor dimension`. `shard(image, mesh, h=2, w=3)` shards dimension 2 over the mesh
            dimension "h" and dimension 3 over "w". Two mesh dimensions may shard one tensor dimension, the first one of
            the mesh outermost. The tensor is replicated over mesh dimensions that are not named.

    Returns:
        A DTensor on the mesh's device. It is a new leaf for autograd, and requires a gradient if `array` does.

    Raises:
        ShardingError: `array` is a DTensor, a name is not a mesh dimension, a dimension does not exist, or the ranks
            give arrays of different shapes, dtypes or (compared in the first calls) values.

    Examples:
        >>> x = convmesh.shard(torch.zeros(4, 3, 8, 6), mesh, data=0, h=2)
        >>> x.placements
        (Shard(dim=0), Shard(dim=2))
        >>> tuple(x.shape), tuple(x.to_local().shape)
        ((4, 3, 8, 6), (2, 3, 4, 6))
    """
    layout = _layout(tuple(array.shape), mesh, dims)
    if isinstance(array, DTensor):
        raise ShardingError("shard: this is a DTensor already\n  remedy: tensor.redistribute(mesh, placements)")
    tensor = array if isinstance(array, torch.Tensor) else None
    if tensor is not None:
        layout = replace(layout, stride=tuple(tensor.stride())).dense
    part, in_memory = read(array, _region(layout)), kind_of(array) != "file"
    requires_grad = tensor is not None and tensor.requires_grad
    compare(
        "shard", mesh,
        f"{kind_of(array)} {_facts(layout, part, dims)}{', requires a gradient' if requires_grad else ''}",
        "give all ranks the same array, from the same files in the same order, shuffled with the same seed; "
        f"where each has read a part, convmesh.from_region(part, shape, mesh, {_dims_text(dims)})",
        values=lambda: sample(array) if in_memory else part,
        copies_along=range(mesh.ndim) if in_memory else _copies_along(layout),
    )  # fmt: skip
    # A part of a tensor is a view, which would keep the full tensor alive.
    placed = _wrap(part if tensor is None else part.clone(), layout)
    placed.requires_grad_(requires_grad)
    return placed


def replicate(values: Values, mesh: DeviceMesh) -> Values:
    """Make replicated DTensors from plain tensors: the full tensor on every rank of the mesh.

    Use it to call a distributed model with an input that is not sharded, for example a small image in evaluation. Every
    rank then computes the full result, which `output.to_local()` returns as a plain tensor. Nothing is sent, except
    small checks that all ranks gave the same values.

    Args:
        values: A tensor, or a dict, list or tuple of tensors and other values, the same on every rank. Other values
            and DTensors stay as they are.
        mesh: The mesh of the model.

    Returns:
        The same with DTensors in place of plain tensors.

    Raises:
        ShardingError: The ranks give tensors of different shapes, dtypes or (compared in the first calls) values.

    Examples:
        >>> model = convmesh.distribute(nn.Conv2d(1, 2, 3), mesh).eval()
        >>> with torch.inference_mode():
        ...     scores = model(convmesh.replicate(torch.zeros(1, 1, 8, 8), mesh)).to_local()
        >>> type(scores), tuple(scores.shape)
        (<class 'torch.Tensor'>, (1, 2, 6, 6))
    """
    replicated: Values = tree_map_only(
        torch.Tensor, lambda value: value if isinstance(value, DTensor) else shard(value, mesh), values
    )
    return replicated


def region(shape: tuple[int, ...] | DTensor, mesh: DeviceMesh | None = None, **dims: int) -> Region:
    """Return the slices of a global array that this rank owns.

    Args:
        shape: The shape of the global array. Or a DTensor: then the result is the region of its local tensor, for
            example in a file that all ranks write.
        mesh: The mesh, if `shape` is a shape.
        **dims: `mesh dimension = tensor dimension`, as in `shard`.

    Returns:
        One slice for each dimension.

    Raises:
        ShardingError: A shape is given without a mesh, a name or dimension is wrong (see `shard`), or the DTensor has
            `Partial` placements, or several mesh dimensions shard one tensor dimension in an order other than theirs.

    Examples:
        >>> volume = torch.arange(64.0).reshape(8, 8)  # or a memory map, zarr, HDF5
        >>> part = volume[convmesh.region(volume.shape, mesh, h=0)]
        >>> tuple(part.shape)
        (4, 8)
        >>> x = convmesh.from_region(part, volume.shape, mesh, h=0)
        >>> out = torch.zeros(8, 8)
        >>> out[convmesh.region(x)] = x.to_local()
    """
    if isinstance(shape, DTensor):
        spec = _torch.spec_of(shape)
        if not _torch.plain_order(spec) or any(placement.is_partial() for placement in spec.placements):
            raise refuse("region", "the parts are Partial(sum)s, or sharded in an unusual order", [("tensor", shape)],
                         "redistribute it to Shard and Replicate placements first")  # fmt: skip
        return _region(Layout.of(spec))
    if mesh is None:
        raise ShardingError("region: a shape needs a mesh\n  remedy: region(shape, mesh, h=2, w=3)")
    return _region(_layout(tuple(shape), mesh, dims))


def from_region(local: Any, shape: tuple[int, ...], mesh: DeviceMesh, **dims: int) -> DTensor:
    """Make a sharded DTensor from the slice that this rank has read.

    Args:
        local: This rank's slice of the array: `array[region(shape, mesh, **dims)]`.
        shape: The shape of the global array.
        mesh: A mesh whose dimensions have names.
        **dims: `mesh dimension = tensor dimension`, as in `shard`.

    Returns:
        A DTensor of the global shape.

    Raises:
        ShardingError: On all ranks, if the slice of any rank has the wrong shape or another dtype, or if ranks that own
            the same slice give different values (compared in the first calls).

    Examples:
        >>> array = torch.arange(48.0).reshape(1, 1, 8, 6)
        >>> part = array[convmesh.region(array.shape, mesh, h=2)]
        >>> x = convmesh.from_region(part, array.shape, mesh, h=2)
        >>> torch.equal(x.full_tensor(), array)
        True
    """
    return assembled("from_region", as_tensor(local), tuple(shape), mesh, dims)


def assembled(
    operation: str, part: torch.Tensor, shape: tuple[int, ...], mesh: DeviceMesh, dims: Mapping[str, int],
    problem: str | None = None,
) -> DTensor:  # fmt: skip
    """Do `from_region`; if any rank has a `problem`, all ranks raise an error."""
    layout = _layout(shape, mesh, dims)
    if problem is None and mesh.get_coordinate() is not None and tuple(part.shape) != layout.local_shape:
        problem = f"this rank's local tensor of {shape} has shape {layout.local_shape}, not {tuple(part.shape)}"
    compare(
        operation, mesh, _facts(layout, part, dims),
        f"read array[convmesh.region({shape}, mesh, {_dims_text(dims)})] on every rank, of the same array",
        values=lambda: part, copies_along=_copies_along(layout), problem=problem,
    )  # fmt: skip
    return _wrap(part, layout)


def placements(ndim: int, mesh: DeviceMesh, dims: Mapping[str, int]) -> tuple[Placement, ...]:
    """Return the placements that `dims` gives a tensor with `ndim` dimensions."""
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
        at[name] = dim % ndim
    return tuple(Shard(at[name]) if name in at else Replicate() for name in names or (None,) * mesh.ndim)


def _layout(shape: tuple[int, ...], mesh: DeviceMesh, dims: Mapping[str, int]) -> Layout:
    check_one_rank("shard", mesh)
    stride = dense_stride(shape, torch.contiguous_format)
    return Layout(mesh, placements(len(shape), mesh, dims), shape, stride, torch.get_default_dtype())


def _facts(layout: Layout, part: torch.Tensor, dims: Mapping[str, int]) -> str:
    strides = "" if layout.memory_format == torch.contiguous_format else f" {layout.memory_format}"
    return f"{layout.shape} {part.dtype}{strides}, {_dims_text(dims) or 'replicated'}"


def _copies_along(layout: Layout) -> list[int]:
    return [mesh_dim for mesh_dim, placement in enumerate(layout.placements) if isinstance(placement, Replicate)]


def _region(layout: Layout) -> Region:
    if layout.mesh.get_coordinate() is None:  # a rank outside of the mesh owns nothing
        return tuple(slice(0, 0) for _ in layout.shape)
    return tuple(slice(own.start, own.stop) for own in map(layout.own, range(len(layout.shape))))


def _wrap(part: torch.Tensor, layout: Layout) -> DTensor:
    pinned = False
    if not torch.compiler.is_compiling():
        enable_unless_told()
        pinned = part.is_pinned()  # a copy from pinned memory can be asynchronous
    # Views of a DTensor follow its global strides, so the local ones must agree with them.
    part = part.to(layout.mesh.device_type, non_blocking=pinned).contiguous(memory_format=layout.memory_format)
    return DTensor.from_local(
        part, layout.mesh, layout.placements, run_check=False, shape=torch.Size(layout.shape), stride=layout.stride
    )


def _dims_text(dims: Mapping[str, int]) -> str:
    return ", ".join(f"{name}={dim}" for name, dim in dims.items())


def _example(names: tuple[str, ...] | None, ndim: int) -> str:
    last = (names or ())[-ndim:] if ndim else ()
    return _dims_text({name: ndim - len(last) + number for number, name in enumerate(last)})
