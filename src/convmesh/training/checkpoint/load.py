"""Reading a checkpoint: all of it is read and verified, on all ranks, before anything is changed."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from socket import gethostname
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ..errors import CheckpointError
from . import files, pending
from .contents import Contents, Undo
from .folder import check_shared, find
from .manifest import NAME, Manifest, read_manifest
from .ranks import Ranks
from .shards import Target
from .values import decode


@dataclass(frozen=True)
class Checkpoint:
    """What `load_checkpoint` has read: where it was, after which step, and what else was saved, by name."""

    path: Path
    step: int
    extra: dict[str, Any]


def load_checkpoint(
    folder: str | Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    step: int | None = None,
    random_state: bool = True,
    process_group: dist.ProcessGroup | None = None,
    **extra: Any,
) -> Checkpoint:
    """Load the last checkpoint in `folder`, or that of `step`, into objects on any mesh or none. All ranks call this.

    Of `extra`, modules, optimizers and what has `load_state_dict()` get their state back; plain values that were saved
    are in the result. The random state becomes that of the first rank, on all ranks, unless `random_state` is False.
    If it raises, on whatever rank, nothing has changed.
    """
    pending.finish()
    place = Path(folder)
    wanted = "the last checkpoint" if step is None else f"step {step}"
    ranks = Ranks(model, process_group, f"loading {wanted} from {place}", "load an earlier step")
    wanted_objects = {"model": model, "optimizer": optimizer, **extra}
    contents = Contents({name: value for name, value in wanted_objects.items() if value is not None})
    path, checksum = ranks.on_first(lambda: _found(place, step))
    found, loaded = ranks.agree(lambda: _stage(Path(path), checksum, contents, random_state))
    undo: Undo = []
    try:
        ranks.agree(lambda: contents.apply(loaded, random_state, undo))
    except BaseException:
        for take_back in reversed(undo):
            with suppress(Exception):  # the first error is the one to be seen, and the rest has to be taken back, too
                take_back()
        raise
    return found


def _found(place: Path, step: int | None) -> tuple[str, str]:
    """Which checkpoint it is, and the checksum of its manifest. All of its files are looked at."""
    path = find(place, step)
    manifest, checksum = read_manifest(path)
    manifest.check(path)
    return str(path), checksum


def _stage(path: Path, checksum: str, contents: Contents, random_state: bool) -> tuple[Checkpoint, dict[str, Any]]:
    """Everything that was saved, with this rank's part of all tensors in memory of its own."""
    check_shared(path)
    manifest, own = read_manifest(path)
    if own != checksum:
        raise CheckpointError(
            f"load_checkpoint: {path / NAME} is another one on {gethostname()} than on the first rank's host\n"
            "  remedy: a folder that is shared between all hosts"
        )
    targets = contents.targets(_decoded(manifest, {}), random_state, path)
    staged = {target.saved.name: _read(path, target, manifest.block) for target in targets}
    loaded = _decoded(manifest, staged)
    return Checkpoint(path, loaded["step"], loaded["values"]), loaded


def _read(path: Path, target: Target, block: int) -> torch.Tensor:
    return target.build(files.read(path, target.saved, target.box, block))


def _decoded(manifest: Manifest, staged: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """The sections of a checkpoint. Tensors that were not staged stay what the manifest says of them."""
    tensors = {**manifest.tensors, **staged}
    return {section: decode(value, tensors) for section, value in manifest.tree.items()}
