"""Reading a checkpoint: everything is read and verified, on all ranks, before anything is changed."""

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
    """The result of `load_checkpoint`.

    Attributes:
        path: The folder of the checkpoint.
        step: The step after which it was saved.
        extra: The plain values that were saved, by name.
    """

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
    """Load the latest checkpoint of a folder, or that of a given step. All ranks must call this function.

    The number of processes and the mesh may differ from those that saved it. Everything is read and verified before
    anything is changed.

    Args:
        folder: The folder that was given to `save_checkpoint`.
        model: The module to load into, distributed or not.
        optimizer: Its optimizer.
        step: The step of the checkpoint. By default the latest.
        random_state: Whether to restore the random state: all ranks get that of the first rank.
        process_group: The ranks that take part. By default, those of the model's mesh.
        **extra: The modules, optimizers and objects with `load_state_dict()` that were saved under these names.

    Returns:
        The path, the step and the plain values that were saved.

    Raises:
        CheckpointError: On all ranks, before anything is changed: there is no such checkpoint, it is damaged or not
            visible to all hosts, or it belongs to another model, optimizer, scheduler or dtype.

    Examples:
        >>> model = convmesh.distribute(nn.Conv2d(1, 1, 3), mesh)
        >>> if convmesh.latest_checkpoint("runs/b"):
        ...     step = convmesh.load_checkpoint("runs/b", model).step
        ... else:
        ...     step = 0
        >>> step
        0
    """
    pending.finish()
    place = Path(folder)
    wanted = "the last checkpoint" if step is None else f"step {step}"
    ranks = Ranks(model, process_group, f"loading {wanted} from {place}", "load an earlier step")
    wanted_objects = {"model": model, "optimizer": optimizer, **extra}
    contents = Contents({name: value for name, value in wanted_objects.items() if value is not None})
    path, checksum = ranks.on_first(lambda: _locate(place, step))
    found, loaded = ranks.agree(lambda: _stage(Path(path), checksum, contents, random_state))
    undo: Undo = []
    try:
        ranks.agree(lambda: contents.apply(loaded, random_state, undo))
    except BaseException:
        for take_back in reversed(undo):
            with suppress(Exception):  # the first error is reported, and the rest must be undone, too
                take_back()
        raise
    return found


def _locate(place: Path, step: int | None) -> tuple[str, str]:
    """Return the path of the checkpoint and the checksum of its manifest, after checking that all files are there."""
    path = find(place, step)
    manifest, checksum = read_manifest(path)
    manifest.check(path)
    return str(path), checksum


def _stage(path: Path, checksum: str, contents: Contents, random_state: bool) -> tuple[Checkpoint, dict[str, Any]]:
    """Return everything that was saved, with newly allocated local tensors of this rank."""
    check_shared(path)
    manifest, own = read_manifest(path)
    if own != checksum:
        raise CheckpointError(
            f"load_checkpoint: {path / NAME} is another one on {gethostname()} than on the first rank's host\n"
            "  remedy: a folder that is shared between all hosts"
        )
    targets = contents.targets(_decode(manifest, {}), random_state, path)
    staged = {target.saved.name: _read(path, target, manifest.block) for target in targets}
    loaded = _decode(manifest, staged)
    return Checkpoint(path, loaded["step"], loaded["values"]), loaded


def _read(path: Path, target: Target, block: int) -> torch.Tensor:
    return target.build(files.read(path, target.saved, target.box, block))


def _decode(manifest: Manifest, staged: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """Return the sections of a checkpoint. Tensors that were not staged stay `Saved` entries of the manifest."""
    tensors = {**manifest.tensors, **staged}
    return {section: decode(value, tensors) for section, value in manifest.tree.items()}
