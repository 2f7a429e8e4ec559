"""Which part of a tensor a rank writes, and which it reads: the number of ranks and the mesh may change in between."""

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

# Ranks that all have a tensor share the work of writing it, in parts of this size at least.
_SHARED_BYTES = 1 << 20


@dataclass(frozen=True)
class Chunk:
    """A box of a saved tensor: the file that has it, where its bytes begin, and the checksum of each of its blocks."""

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
    """What a rank writes of a tensor: a box of it."""

    name: str
    box: Box
    data: torch.Tensor


def piece_of(name: str, tensor: torch.Tensor, first: bool) -> Piece | None:
    """What this rank writes: of a DTensor what it has and nobody else writes, of a plain tensor all, on the first."""
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
    turn = (copy + zlib.crc32(name.encode())) % copies  # not always the same ranks
    rows = shards(len(box[0]), (parts,))[turn] if turn < parts else None
    return Piece(name, (rows.shift(box[0].start), *box[1:]), local[rows.start : rows.stop]) if rows else None


def own_box(tensor: torch.Tensor) -> Box:
    """What this rank has of it."""
    if not isinstance(tensor, DTensor):
        return full_box(tensor.shape)
    return tuple(Interval(side.start, side.stop) for side in region(tensor))


def full_box(shape: tuple[int, ...]) -> Box:
    return tuple(Interval(0, size) for size in shape)


@dataclass(frozen=True)
class Target:
    """A tensor that is to be loaded, like one that is there; without one, as a plain tensor."""

    saved: Saved
    like: torch.Tensor | None = None

    @property
    def box(self) -> Box:
        """What this rank reads: what it has of a tensor of the same shape, of another all."""
        if self.like is None or self.like.shape != self.saved.shape:
            return full_box(self.saved.shape)
        return own_box(self.like)

    def build(self, local: torch.Tensor) -> torch.Tensor:
        """What was read, as a new tensor on the device and mesh, and with the strides, of the one that it is like."""
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
    """Write to what this rank has of a tensor, which is nothing outside of its mesh."""
    target = local_of(tensor)
    if target.numel():
        target.copy_(local)


def tensors_in(saved: Any, like: Any = None) -> Iterator[Target]:
    """A place for each tensor in a tree of values: like the one at its place in the tree `like`, if there is one."""
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
    """On how many ranks is what this one has, and the how manyth of them is it?"""
    copies, copy = 1, 0
    coordinate = tensor.device_mesh.get_coordinate()
    assert coordinate is not None, "asked of ranks of the mesh only"
    for size, at, placement in zip(tensor.device_mesh.shape, coordinate, tensor.placements, strict=True):
        if placement.is_replicate():
            copies, copy = copies * size, copy * size + at
    return copies, copy


def check_covered(saved: Saved) -> None:
    """The boxes of a saved tensor are parts of it, and together as large as it is."""
    inside = all(0 <= side.start <= side.stop <= size
                 for chunk in saved.chunks for side, size in zip(chunk.box, saved.shape, strict=True))  # fmt: skip
    if not inside or sum(volume(chunk.box) for chunk in saved.chunks) != math.prod(saved.shape):
        raise CheckpointError(
            f"checkpoint: the parts of {saved.name} {saved.shape} that were written are not all of it\n"
            "  remedy: process_group=dist.group.WORLD, if other ranks have parts of it; call it on all of them"
        )


def _unfit(name: str, what: str, remedy: str) -> CheckpointError:
    return CheckpointError(f"save_checkpoint: {name} {what}\n  remedy: {remedy}")
