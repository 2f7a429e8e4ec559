"""The files of a checkpoint: safetensors, written with checksums of all bytes, and read in parts that are verified.

A safetensors file is: eight bytes with the length of the header; the header, JSON with the location of each tensor; the
tensors' data. Checksums are per block, so that a rank that needs a part of a tensor reads and verifies only the blocks
that contain it. They are stored in the manifest.
"""

from __future__ import annotations

import json
import os
import stat
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ...geometry import Box, Interval, volume
from ..errors import CheckpointError
from .shards import Chunk, Piece, Saved

BLOCK_BYTES = 1 << 20
# At most this much is read at once, however large the tensor.
_READ_BYTES = 16 << 20
_DTYPES = {
    "float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16", "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2", "int64": "I64", "int32": "I32", "int16": "I16", "int8": "I8", "uint8": "U8",
    "uint16": "U16", "uint32": "U32", "uint64": "U64", "bool": "BOOL", "complex64": "C64",
}  # fmt: skip
Bytes = bytearray | memoryview


@dataclass(frozen=True)
class File:
    """A file's entry in the manifest: its size, and the length and checksum of its header."""

    size: int
    header_size: int
    header_crc32: int

    def check(self, path: Path) -> None:
        """Verify all but the tensors' data, which are verified when they are read."""
        said = path.stat()
        if not stat.S_ISREG(said.st_mode):
            raise damaged(path, "is not a file")
        if said.st_size != self.size:
            raise damaged(path, f"has {said.st_size} bytes instead of {self.size}")
        if zlib.crc32(read_bytes(path, 0, self.header_size)) != self.header_crc32:
            raise damaged(path, "has another header than was written: its checksum is wrong")


def is_known(dtype: torch.dtype) -> bool:
    """Whether safetensors supports a dtype."""
    return str(dtype).removeprefix("torch.") in _DTYPES


def damaged(path: Path, how: str) -> CheckpointError:
    return CheckpointError(f"checkpoint: {path} {how}\n  remedy: bring the file back, or load an earlier step")


def bytes_of(tensor: torch.Tensor) -> bytearray:
    """Return a copy of a tensor's elements, row by row, as bytes that can be written to a file."""
    copy = bytearray(tensor.nbytes)
    torch.frombuffer(copy, dtype=tensor.dtype).view(tensor.shape).copy_(tensor)
    return copy


def write(
    path: Path, pieces: Sequence[Piece], contents: Callable[[Piece], Bytes], block: int
) -> tuple[File, list[Chunk]]:
    """Write a file of these pieces, with `contents(piece)` as their data, and flush it to disk."""
    header, offsets = _header(pieces)
    chunks: list[Chunk] = []
    with path.open("xb") as file:
        file.write(header)
        for piece, offset in zip(pieces, offsets, strict=True):
            data = memoryview(contents(piece))
            file.write(data)
            sums = tuple(zlib.crc32(data[begin : begin + block]) for begin in range(0, len(data), block))
            chunks.append(Chunk(path.name, len(header) + offset, piece.box, sums))
        size = file.tell()
        file.flush()
        os.fsync(file.fileno())
    return File(size, len(header), zlib.crc32(header)), chunks


def read(folder: Path, saved: Saved, box: Box, block: int) -> torch.Tensor:
    """Read a box of a saved tensor: only the blocks that contain it, each of which is verified."""
    result = torch.empty([len(side) for side in box], dtype=saved.dtype)
    filled = 0
    for chunk in saved.chunks:
        common = tuple(a & b for a, b in zip(chunk.box, box, strict=True))
        if volume(common):
            within = [side.shift(-outer.start) for side, outer in zip(common, box, strict=True)]
            wanted = tuple(side.shift(-outer.start) for side, outer in zip(common, chunk.box, strict=True))
            target = result[tuple(slice(side.start, side.stop) for side in within)]
            _read_into(target, _Source(folder, chunk, saved.dtype, block), 0, [len(s) for s in chunk.box], wanted)
            filled += volume(common)
    if filled != result.numel():
        raise damaged(folder, f"does not have all of {saved.name}")
    return result


@dataclass(frozen=True)
class _Source:
    """The elements of a chunk, in order."""

    folder: Path
    chunk: Chunk
    dtype: torch.dtype
    block: int

    def numbers(self, begin: int, end: int) -> torch.Tensor:
        path, item, length = self.folder / self.chunk.file, self.dtype.itemsize, volume(self.chunk.box)
        first, last = begin * item // self.block, -(-end * item // self.block)
        start = first * self.block
        data = read_bytes(path, self.chunk.begin + start, min(last * self.block, length * item) - start)
        view = memoryview(data)
        for number in range(first, last):
            at = number * self.block - start
            if zlib.crc32(view[at : at + self.block]) != self.chunk.crc32[number]:
                raise damaged(path, f"is damaged: the checksum of block {number} from byte {self.chunk.begin} on, of "
                                    f"{self.block} bytes each, is wrong")  # fmt: skip
        return torch.frombuffer(data, dtype=self.dtype, count=end - begin, offset=begin * item - start)


def _read_into(
    target: torch.Tensor, source: _Source, begin: int, shape: Sequence[int], box: Sequence[Interval]
) -> None:
    """Copy a box of the array of this shape that begins at element `begin`: some rows at a time, or parts of a row."""
    if not shape:
        target.copy_(source.numbers(begin, begin + 1).view(()))
        return
    row = volume([Interval(0, size) for size in shape[1:]])
    at_once = _READ_BYTES // (row * source.dtype.itemsize)
    inner = tuple(slice(side.start, side.stop) for side in box[1:])
    for start in range(box[0].start, box[0].stop, max(1, at_once)):
        part = target[start - box[0].start :][: max(1, at_once)]
        if at_once:
            rows = source.numbers(begin + start * row, begin + (start + len(part)) * row)
            part.copy_(rows.view(len(part), *shape[1:])[(slice(None), *inner)])
        else:
            _read_into(part[0], source, begin + start * row, shape[1:], box[1:])


def read_bytes(path: Path, begin: int, size: int) -> bytearray:
    data = bytearray(size)
    with path.open("rb", buffering=0) as file:
        file.seek(begin)
        view, got = memoryview(data), 0
        while got < size:
            more = file.readinto(view[got:])
            if not more:
                raise damaged(path, f"ends at byte {begin + got}, before {begin + size}")
            got += more
    return data


def _header(pieces: Sequence[Piece]) -> tuple[bytes, list[int]]:
    """Return the header of a safetensors file, and the offset of each piece in the data.

    The box of each piece is also stored in the format of torch.distributed.checkpoint, which can read the file too.
    """
    boxes = {piece.name: {"saved_offsets": [side.start for side in piece.box]} for piece in pieces}
    entries: dict[str, Any] = {"__metadata__": {"format": "pt", "DCP_SHARDING_INFO": json.dumps(boxes)}}
    offsets, end = [], 0
    for piece in pieces:
        offsets.append(end)
        end += piece.data.nbytes
        dtype, shape = _DTYPES.get(str(piece.data.dtype).removeprefix("torch.")), [len(side) for side in piece.box]
        if dtype is None:  # safetensors does not support it: store its bytes
            dtype, shape = "U8", [*shape, piece.data.itemsize]
        entries[piece.name] = {"dtype": dtype, "shape": shape, "data_offsets": [offsets[-1], end]}
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text, offsets
