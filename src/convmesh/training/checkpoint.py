"""Checkpoints of a distributed training, which go on in any number of processes, and are whole or not there.

A checkpoint is written into a new folder that gets its name when everything is on disk: a crash in the middle leaves
the last one as it was. The files are those of `torch.distributed.checkpoint`: each rank writes what it has.
"""

from __future__ import annotations

import os
import re
import shutil
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.tensor import DTensor

from .checkpoint_state import REST, Contents
from .errors import CheckpointError

_NAME = re.compile(r"step-(\d+)(?:-(\d+))?")
_UNFINISHED = ".unfinished-"
_READ = "see whether all ranks can read this folder, or load an earlier step"
Result = TypeVar("Result")


@dataclass(frozen=True)
class Checkpoint:
    """What `load_checkpoint` has read: where it was, after which step, and what else was saved, by name."""

    path: Path
    step: int
    extra: dict[str, Any]


def save_checkpoint(
    folder: str | Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    step: int,
    keep: int | None = 3,
    process_group: dist.ProcessGroup | None = None,
    **extra: Any,
) -> Path:
    """Write a checkpoint into `folder`, which all ranks see, and return where it is. All ranks call this.

    `extra` are other modules (an averaged copy) and optimizers, whatever has `state_dict()` (a scheduler, a scaler),
    and plain values, of which the first rank's are kept. The random state is saved as well. Of the checkpoints in the
    folder, the last `keep` stay; None keeps all. `process_group` is only needed for a model on a part of the ranks.
    """
    folder = Path(folder)
    if keep is not None and keep < 1:
        raise CheckpointError(
            f"save_checkpoint: keep={keep} would remove the new checkpoint\n  remedy: 1 or more, or None"
        )
    process_group = _group(model, process_group)
    unfinished = folder / f"{_UNFINISHED}{step}"
    state = Contents({"model": model, "optimizer": optimizer, **extra}).collect(step)
    with _explained(f"saving step {step} in {folder}", "start again: load_checkpoint finds the last whole one"):
        _on_first_rank(process_group, lambda: _make_empty(unfinished))
        save(
            state,
            storage_writer=FileSystemWriter(unfinished),
            planner=DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False),
            process_group=process_group,
            no_dist=not dist.is_initialized(),
        )
        return _on_first_rank(process_group, lambda: _publish(unfinished, folder, step, keep))


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
    """
    folder, process_group = Path(folder), _group(model, process_group)
    path, problem = _on_first_rank(process_group, lambda: _find(folder, step))
    if path is None:
        raise CheckpointError(problem)
    with _explained(f"loading {path}", _READ):
        metadata = FileSystemReader(path).read_metadata().state_dict_metadata
    rest = _read({REST: None}, path, process_group)[REST]
    contents = Contents({"model": model, "optimizer": optimizer, **extra})
    contents.apply(_read(contents.template(metadata, rest, path), path, process_group), rest, random_state)
    return Checkpoint(path, rest["step"], rest["values"])


def _read(state: dict[str, Any], path: Path, process_group: dist.ProcessGroup | None) -> dict[str, Any]:
    """`state` with the values of the checkpoint: its tensors are written to."""
    with _explained(f"loading {path}", _READ):
        load(
            state,
            storage_reader=FileSystemReader(path),
            planner=DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False),
            process_group=process_group,
            no_dist=not dist.is_initialized(),
        )
    return state


def latest_checkpoint(folder: str | Path) -> Path | None:
    """The checkpoint of the greatest step, None if there is none."""
    found = _checkpoints(Path(folder))
    return found[-1] if found else None


def _group(model: nn.Module, given: dist.ProcessGroup | None) -> dist.ProcessGroup | None:
    """Of the ranks that have the model: None is all of them, who would else wait for those outside of its mesh."""
    meshes = {tensor.device_mesh for tensor in model.state_dict().values() if isinstance(tensor, DTensor)}
    if given is not None or len(meshes) != 1:
        return given
    (mesh,) = meshes
    if mesh.size() == dist.get_world_size():
        return None
    if mesh.ndim == 1:
        return mesh.get_group()
    raise CheckpointError(
        f"checkpoint: the model is on a mesh of {mesh.size()} ranks, and there are {dist.get_world_size()}\n"
        "  remedy: process_group=dist.new_group(the ranks of the mesh), made once, by all ranks"
    )


def _checkpoints(folder: Path) -> list[Path]:
    """From the first step to the last; of one step, as they were written."""
    named = [(match, path) for path in folder.glob("step-*") if (match := _NAME.fullmatch(path.name))]
    return [path for _, path in sorted(((int(m[1]), int(m[2] or 0)), path) for m, path in named)]


def _find(folder: Path, step: int | None) -> tuple[Path | None, str]:
    found = [path for path in _checkpoints(folder) if step is None or f"{path.name}-".startswith(f"{_named(step)}-")]
    if found:
        return found[-1], ""
    there = ", ".join(path.name for path in _checkpoints(folder)) or "none"
    wanted = "no checkpoint" if step is None else f"no checkpoint of step {step}"
    return None, (f"load_checkpoint: {folder} has {wanted}; there is: {there}\n"
                  "  remedy: start from the beginning if latest_checkpoint(folder) is None")  # fmt: skip


def _named(step: int) -> str:
    return f"step-{step:09d}"


def _make_empty(folder: Path) -> None:
    """Also removes what earlier crashes have left behind."""
    for left in folder.parent.glob(f"{_UNFINISHED}*"):
        shutil.rmtree(left)
    folder.mkdir(parents=True)


def _publish(unfinished: Path, folder: Path, step: int, keep: int | None) -> Path:
    """Give a whole checkpoint its name. One that is there under this name already is not touched before that."""
    target, number = folder / _named(step), 1
    while target.exists():
        target, number = folder / f"{_named(step)}-{number}", number + 1
    unfinished.rename(target)
    _flush(folder)
    for old in _checkpoints(folder)[: -keep if keep is not None else 0]:
        # Under another name first, so that one that is half removed does not count.
        shutil.rmtree(old.rename(folder / f"{_UNFINISHED}{old.name}"))
    return target


def _flush(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _on_first_rank(group: dist.ProcessGroup | None, work: Callable[[], Result]) -> Result:
    """The result of the first rank's work, on all ranks; so is its error."""
    if not dist.is_initialized():
        return work()
    said: list[Any] = [None, None]
    if dist.get_rank(group) == 0:
        try:
            said[0] = work()
        except OSError as error:
            said[1] = error
    dist.broadcast_object_list(said, group=group, group_src=0)
    if said[1] is not None:
        raise said[1]
    result: Result = said[0]
    return result


@contextmanager
def _explained(what: str, remedy: str) -> Iterator[None]:
    """One kind of error for all that can go wrong between ranks and disks."""
    try:
        with warnings.catch_warnings():
            # That one process is alone it knows itself.
            warnings.filterwarnings("ignore", "torch.distributed is disabled, unavailable or uninitialized")
            yield
    except (CheckpointException, RuntimeError, OSError) as error:
        raise CheckpointError(f"{what} failed\n  reason: {error}\n  remedy: {remedy}") from error
