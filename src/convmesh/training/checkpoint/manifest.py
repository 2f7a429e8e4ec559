"""The manifest of a checkpoint, `manifest.json`, which describes all other files."""

from __future__ import annotations

import json
import re
import sys
import zlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from ...geometry import Interval, volume
from ..errors import CheckpointError
from .files import File, damaged, read_bytes
from .shards import Chunk, Saved, check_covered
from .values import dtype_called, dtype_name

NAME = "manifest.json"
_FORMAT = "convmesh checkpoint 2"
_FILE = re.compile(r"rank-\d{5,}\.safetensors")
# The first line, with the checksum of the others. All lines together are JSON.
_HEAD = '{{"format": "{}", "crc32": "{:08x}",\n'


@dataclass(frozen=True)
class Manifest:
    """The files of a checkpoint, its tensors, the block size of the checksums, and all other values as a tree."""

    files: Mapping[str, File]
    tensors: Mapping[str, Saved]
    tree: Any
    block: int

    def text(self) -> bytes:
        tensors = {
            name: {"dtype": dtype_name(it.dtype), "shape": list(it.shape), "chunks": list(map(pack, it.chunks))}
            for name, it in self.tensors.items()
        }
        said = {"torch": str(torch.__version__), "byte order": sys.byteorder, "block": self.block,
                "files": {name: asdict(file) for name, file in self.files.items()},
                "tensors": tensors, "tree": self.tree}  # fmt: skip
        rest = json.dumps(said, allow_nan=False)[1:].encode()
        return _HEAD.format(_FORMAT, zlib.crc32(rest)).encode() + rest

    def check(self, folder: Path) -> None:
        """Check that every file is there as written, except the tensors' data, and that there is no other file."""
        there = {path.name for path in folder.iterdir()}
        for name in sorted(self.files.keys() | there):
            if name not in there:
                raise damaged(folder / name, "is missing")
            if name in self.files:
                self.files[name].check(folder / name)
            elif name != NAME:
                raise CheckpointError(
                    f"checkpoint: {folder / name} does not belong to this checkpoint\n  remedy: remove it"
                )


def read_manifest(folder: Path) -> tuple[Manifest, str]:
    """Return the manifest and its checksum. Its entries have been checked for consistency."""
    path = folder / NAME
    if not path.exists() and (folder / ".metadata").exists():
        raise CheckpointError(
            f"load_checkpoint: {folder} is of an old format, that of convmesh 0.1.0, which could run foreign code\n"
            "  remedy: if you trust it, load it with convmesh 0.1.0, and torch.save the state_dict() of the model"
        )
    if not path.is_file():
        raise damaged(path, "is missing")
    data = bytes(read_bytes(path, 0, path.stat().st_size))
    head, newline, rest = data.partition(b"\n")
    checksum = zlib.crc32(rest)
    if head + newline != _HEAD.format(_FORMAT, checksum).encode():
        raise damaged(path, "is damaged, or of another format: its first line is not the checksum of the rest")
    try:
        said = json.loads(data)
        manifest = _parsed(said)
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise damaged(path, f"does not make sense: {error!r}") from error
    if said["byte order"] != sys.byteorder:
        raise CheckpointError(f"load_checkpoint: {folder} is from a machine of another byte order\n"
                              "  remedy: load it on such a machine")  # fmt: skip
    return manifest, f"{checksum:08x}"


def pack(chunk: Chunk) -> list[Any]:
    """Return a chunk as JSON, for the manifest and for the rank that writes that."""
    return [chunk.file, chunk.begin, [[side.start, side.stop] for side in chunk.box], list(chunk.crc32)]


def unpack(data: list[Any]) -> Chunk:
    file, begin, box, sums = data
    return Chunk(file, begin, tuple(Interval(*side) for side in box), tuple(sums))


def _parsed(said: dict[str, Any]) -> Manifest:
    files = {name: File(**file) for name, file in said["files"].items()}
    if not all(map(_FILE.fullmatch, files)):
        raise ValueError(f"file names {sorted(files)}")
    if said["block"] < 1 or said["block"] % 16:
        raise ValueError(f"blocks of {said['block']} bytes")
    tensors = {
        name: Saved(name, dtype_called(tensor["dtype"]), tuple(tensor["shape"]), tuple(map(unpack, tensor["chunks"])))
        for name, tensor in said["tensors"].items()
    }
    for saved in tensors.values():
        check_covered(saved)
        for chunk in saved.chunks:
            size = volume(chunk.box) * saved.dtype.itemsize
            if chunk.begin < 0 or chunk.begin + size > files[chunk.file].size:
                raise ValueError(f"{saved.name} ends after the end of {chunk.file}")
            if len(chunk.crc32) != -(-size // said["block"]):
                raise ValueError(f"{saved.name} has {len(chunk.crc32)} checksums")
    return Manifest(files, tensors, said["tree"], said["block"])
