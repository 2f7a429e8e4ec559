"""Writing a checkpoint: every rank its file, then the first rank the manifest."""

from __future__ import annotations

import operator
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from socket import gethostname
from typing import Any, Literal, overload

import torch
import torch.distributed as dist
from torch import nn

from ...geometry import Box
from ..errors import CheckpointError
from . import files, folder, manifest, pending
from .contents import Contents, first_few
from .files import File
from .manifest import Manifest
from .pending import PendingCheckpoint as PendingCheckpoint
from .ranks import Ranks
from .shards import Chunk, Piece, Saved, check_covered, piece_of
from .values import encode


@overload
def save_checkpoint(
    folder: str | Path, model: nn.Module, optimizer: torch.optim.Optimizer | None = None, *, step: int,
    keep: int | None = None, wait: Literal[True] = True, process_group: dist.ProcessGroup | None = None, **extra: Any,
) -> Path: ...  # fmt: skip
@overload
def save_checkpoint(
    folder: str | Path, model: nn.Module, optimizer: torch.optim.Optimizer | None = None, *, step: int,
    keep: int | None = None, wait: Literal[False], process_group: dist.ProcessGroup | None = None, **extra: Any,
) -> PendingCheckpoint: ...  # fmt: skip
def save_checkpoint(
    folder: str | Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    step: int,
    keep: int | None = None,
    wait: bool = True,
    process_group: dist.ProcessGroup | None = None,
    **extra: Any,
) -> Path | PendingCheckpoint:
    """Write a checkpoint of a model, its optimizers and its random state. All ranks must call this function.

    A checkpoint appears in the folder only when all of it is on disk. See [Checkpoints and failures](reliability.md).

    Args:
        folder: A folder that is visible to all ranks. The checkpoint is a sub-folder, such as `step-000000120`.
        model: The module, distributed or not.
        optimizer: Its optimizer.
        step: The number of completed steps. The checkpoint is named after it.
        keep: Remove all but this many of the latest checkpoints in the folder. By default nothing is removed.
        wait: If False, copy the state now and write it in the background. The next save, a load and the end of the
            process wait for it.
        process_group: The ranks that take part. By default, those of the model's mesh.
        **extra: Further objects, by name: modules (an averaged copy), optimizers, objects with a `state_dict()`
            (schedulers, `GradScaler`), and plain values (numbers, strings, lists, dicts, tensors). Of plain values, the
            first rank's are saved.

    Returns:
        The path of the checkpoint; with `wait=False`, a `PendingCheckpoint`.

    Raises:
        CheckpointError: On all ranks: the folder is not shared or not writable, the disk is full, a rank did not call
            the function, the ranks have different objects, an object cannot be saved, or `step` or `keep` is out of
            range.

    Examples:
        >>> model = convmesh.distribute(nn.Conv2d(1, 1, 3), mesh)
        >>> optimizer = torch.optim.AdamW(model.parameters())
        >>> convmesh.save_checkpoint("runs/a", model, optimizer, step=120, best=0.25).name
        'step-000000120'
        >>> found = convmesh.load_checkpoint("runs/a", model, optimizer)
        >>> found.step, found.extra["best"]
        (120, 0.25)
    """
    pending.finish()
    place = Path(folder)
    ranks = Ranks(model, process_group, f"saving step {step} in {place}",
                  "load_checkpoint finds the last whole one")  # fmt: skip
    objects = {"model": model, **({} if optimizer is None else {"optimizer": optimizer}), **extra}
    job = ranks.agree(lambda: _prepare(place, objects, step, keep, copy=not wait, ranks=ranks))
    return job.run() if wait else pending.start(job.run)


@dataclass
class _RankSave:
    """This rank's part of a save: what it has to write, and the manifest entries for it."""

    ranks: Ranks
    place: Path
    step: int
    keep: int | None
    pieces: list[Piece]
    copies: Mapping[str, bytearray]
    tensors: dict[str, Saved]  # without chunks, which the ranks report
    tree: Any

    def run(self) -> Path:
        ranks = self.ranks
        unfinished = Path(ranks.on_first(lambda: str(folder.make_unfinished(self.place, self.step))))
        try:
            parts = ranks.gather(lambda: self._write(unfinished))
            return Path(ranks.on_first(lambda: str(self._publish(unfinished, parts))))
        except CheckpointError:
            if ranks.first:
                shutil.rmtree(unfinished, ignore_errors=True)
            raise

    def _write(self, unfinished: Path) -> dict[str, Any]:
        """Write this rank's file; return its manifest entries."""
        said: dict[str, Any] = {"host": gethostname(), "file": None, "chunks": {}}
        folder.check_shared(unfinished)
        if self.pieces:
            path = unfinished / f"rank-{self.ranks.number:05d}.safetensors"
            file, chunks = files.write(path, self.pieces, self._bytes_of, files.BLOCK_BYTES)
            said["file"] = [path.name, file.size, file.header_size, file.header_crc32]
            said["chunks"] = {p.name: manifest.pack(chunk) for p, chunk in zip(self.pieces, chunks, strict=True)}
        return said

    def _bytes_of(self, piece: Piece) -> bytearray:
        return self.copies[piece.name] if piece.name in self.copies else files.bytes_of(piece.data)

    def _publish(self, unfinished: Path, parts: list[dict[str, Any]]) -> Path:
        """Write the manifest once the first rank sees all files, rename the folder, then remove old checkpoints."""
        written = {part["file"][0]: File(*part["file"][1:]) for part in parts if part["file"]}
        for part in parts:
            if part["file"] and not (file := unfinished / part["file"][0]).exists():
                raise CheckpointError(
                    f"save_checkpoint: {file} was written on {part['host']}, and {gethostname()} does not see it\n"
                    "  remedy: a folder that is shared between all hosts"
                )
        unknown = sorted({name for part in parts for name in part["chunks"]} - self.tensors.keys())
        if unknown:
            raise CheckpointError(
                f"save_checkpoint: other ranks have tensors that the first rank does not have: {first_few(unknown)}\n"
                "  remedy: give the same objects, in the same state, on all ranks"
            )
        tensors = {name: replace(saved, chunks=_chunks(name, parts)) for name, saved in self.tensors.items()}
        for saved in tensors.values():
            check_covered(saved)
        contents = Manifest(written, tensors, self.tree, files.BLOCK_BYTES)
        contents.check(unfinished)
        with (unfinished / manifest.NAME).open("xb") as file:
            file.write(contents.text())
            file.flush()
            os.fsync(file.fileno())
        path = folder.publish(unfinished, self.step)
        if self.keep is not None:
            folder.remove_old(path, self.keep)
        return path


def _chunks(name: str, parts: list[dict[str, Any]]) -> tuple[Chunk, ...]:
    """Return the chunks of all ranks; a box written on several meshes (buffers besides FSDP's) counts once."""
    by_box: dict[Box, Chunk] = {}
    for part in parts:
        if name in part["chunks"]:
            chunk = manifest.unpack(part["chunks"][name])
            by_box.setdefault(chunk.box, chunk)
    return tuple(by_box.values())


def _prepare(
    place: Path, objects: Mapping[str, Any], step: int, keep: int | None, copy: bool, ranks: Ranks
) -> _RankSave:
    """Collect everything that is to be saved. With `copy`, the objects may change afterwards."""
    if keep is not None and keep < 1:
        raise CheckpointError(f"save_checkpoint: keep={keep} would remove the new checkpoint\n"
                              "  remedy: 1 or more, or None")  # fmt: skip
    if operator.index(step) < 0:
        raise CheckpointError(f"save_checkpoint: step={step} is negative\n  remedy: count from 0")
    tensors: dict[str, torch.Tensor] = {}
    tree: dict[str, Any] = {}
    for section, value in Contents(objects).collect(operator.index(step)).items():
        tree[section] = encode(value, "random" if section == "random" else "", tensors)
    found = (piece_of(name, tensor, ranks.first) for name, tensor in tensors.items())
    pieces = [piece for piece in found if piece is not None]
    copies = {piece.name: files.bytes_of(piece.data) for piece in pieces} if copy else {}
    shapes = {name: Saved(name, tensor.dtype, tuple(tensor.shape), ()) for name, tensor in tensors.items()}
    return _RankSave(ranks, place, step, keep, pieces, copies, shapes, tree)
