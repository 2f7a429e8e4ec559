"""The part of a tensor that a rank writes or reads; ranks and mesh may change between saving and loading."""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate

from ...geometry import Box, Interval, shards, volume
from ..errors import CheckpointError
from ..region import region

# Ranks that hold the same values share the work of writing them, in parts of at least this size.
_SHARED_BYTES = 1 << 20


@dataclass(frozen=True)
class Chunk:
    """A box of a saved tensor: its file, the offset of its first byte, and the checksum of each of its blocks."""

    file: str
    begin: int
    box: Box
    crc32: tuple[int, ...]


@dataclass(frozen=True)
class Saved:
    """A tensor in a checkpoint."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    chunks: tuple[Chunk, ...]


@dataclass(frozen=True)
class Piece:
    """The box of a tensor that a rank writes, and its data."""

    name: str
    box: Box
    data: torch.Tensor


def piece_of(name: str, tensor: torch.Tensor, first: bool) -> Piece | None:
    """Return what this rank writes: a share of a DTensor's local tensor, or on the first rank all of a plain tensor."""
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter, DTensor) or tensor.layout is not torch.strided:
        raise _unfit(name, f"is a {type(tensor).__name__} of layout {tensor.layout}",
                     "a plain dense one: tensor.to_dense(), tensor.as_subclass(torch.Tensor)")  # fmt: skip
    if tensor.is_meta or tensor.is_quantized:
        raise _unfit(name, "has no values of its own: it is on the meta device, or quantized", "leave it out")
    if not isinstance(tensor, DTensor):
        return Piece(name, full_box(tensor.shape), tensor.detach()) if first and tensor.numel() else None
    if any(placement.is_partial() for placement in tensor.placements):
        raise _unfit(name, f"is a Partial: {tensor.placements}", "tensor.redistribute(placements=...) first")
    box, local = own_box(tensor), local_of(tensor)
    if tensor.device_mesh.get_coordinate() is None or not local.numel():
        return None
    copies, copy = _copies(tensor)
    parts = min(copies, local.nbytes // _SHARED_BYTES) if local.ndim else 0
    if parts < 2:
        return Piece(name, box, local) if copy == 0 else None
    turn = (copy + zlib.crc32(name.encode())) % copies  # rotates the ranks that write
    rows = shards(len(box[0]), (parts,))[turn] if turn < parts else None
    return Piece(name, (rows.shift(box[0].start), *box[1:]), local[rows.start : rows.stop]) if rows else None


def own_box(tensor: torch.Tensor) -> Box:
    """Return the box of a tensor that this rank holds."""
    if not isinstance(tensor, DTensor):
        return full_box(tensor.shape)
    return tuple(Interval(side.start, side.stop) for side in region(tensor))


def full_box(shape: tuple[int, ...]) -> Box:
    return tuple(Interval(0, size) for size in shape)


@dataclass(frozen=True)
class Target:
    """A tensor to be loaded, in the layout of an existing one, or plain without one."""

    saved: Saved
    like: torch.Tensor | None = None

    @property
    def box(self) -> Box:
        """The box that this rank reads: its own if the shapes are equal, else all."""
        if self.like is None or self.like.shape != self.saved.shape:
            return full_box(self.saved.shape)
        return own_box(self.like)

    def build(self, local: torch.Tensor) -> torch.Tensor:
        """Return what was read as a new tensor with the device, mesh and strides of `like`."""
        like = self.like
        if like is None:
            return local
        if like.shape != self.saved.shape:
            moved = local.to(like.device)
            if not isinstance(like, DTensor):
                return moved
            return DTensor.from_local(moved, like.device_mesh, [Replicate()] * like.device_mesh.ndim, run_check=False)
        result = torch.empty_like(like.detach(), dtype=local.dtype)
        copy_local(result, local)
        return result


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()


def copy_local(tensor: torch.Tensor, local: torch.Tensor) -> None:
    """Write into this rank's local tensor, which is empty outside of the mesh."""
    target = local_of(tensor)
    if target.numel():
        target.copy_(local)


def tensors_in(saved: Any, like: Any = None) -> Iterator[Target]:
    """Yield a target for each tensor in a tree of values, like the tensor at its place in the tree `like`, if any."""
    if isinstance(saved, Saved):
        yield Target(saved, like if isinstance(like, torch.Tensor) else None)
    elif isinstance(saved, Mapping):
        for key, value in saved.items():
            yield from tensors_in(value, like.get(key) if isinstance(like, Mapping) else None)
    elif isinstance(saved, list | tuple | set | frozenset):
        others = like if isinstance(like, list | tuple) and len(like) == len(saved) else [None] * len(saved)
        for value, other in zip(saved, others, strict=True):
            yield from tensors_in(value, other)


def _copies(tensor: DTensor) -> tuple[int, int]:
    """Return how many ranks hold this rank's values, and this rank's index among them."""
    copies, copy = 1, 0
    coordinate = tensor.device_mesh.get_coordinate()
    assert coordinate is not None, "asked of ranks of the mesh only"
    for size, at, placement in zip(tensor.device_mesh.shape, coordinate, tensor.placements, strict=True):
        if placement.is_replicate():
            copies, copy = copies * size, copy * size + at
    return copies, copy


def check_covered(saved: Saved) -> None:
    """Check that the boxes of a saved tensor are inside of it, and together as large as it is."""
    inside = all(0 <= side.start <= side.stop <= size
                 for chunk in saved.chunks for side, size in zip(chunk.box, saved.shape, strict=True))  # fmt: skip
    if not inside or sum(volume(chunk.box) for chunk in saved.chunks) != math.prod(saved.shape):
        raise CheckpointError(
            f"checkpoint: the parts of {saved.name} {saved.shape} that were written do not cover it\n"
            "  remedy: process_group=dist.group.WORLD, if other ranks have parts of it; call it on all of them"
        )


def _unfit(name: str, what: str, remedy: str) -> CheckpointError:
    return CheckpointError(f"save_checkpoint: {name} {what}\n  remedy: {remedy}")
