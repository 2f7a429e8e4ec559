"""The folder of checkpoints: listing them, and writing, naming and removing one."""

from __future__ import annotations

import logging
import os
import re
import secrets
import shutil
from pathlib import Path
from socket import gethostname

from ..errors import CheckpointError
from . import pending

_NAME = re.compile(r"step-(\d+)(?:-(\d+))?")
_UNFINISHED = ".unfinished-"
# A folder that was not written to for this long was left by a process that was killed.
_ABANDONED_SECONDS = 24 * 3600
log = logging.getLogger("convmesh.checkpoint")


def latest_checkpoint(folder: str | Path) -> Path | None:
    """Return the path of the checkpoint with the greatest step, or None if there is none.

    If a save of this process is still being written, this waits for it.

    Args:
        folder: The folder that was given to `save_checkpoint`. It need not exist.

    Examples:
        >>> print(convmesh.latest_checkpoint("runs/none"))
        None
    """
    pending.finish()
    found = _checkpoints(Path(folder))
    return found[-1] if found else None


def find(folder: Path, step: int | None) -> Path:
    """Return the last checkpoint, or the last one of this step."""
    found = [path for path in _checkpoints(folder) if step is None or f"{path.name}-".startswith(f"{_named(step)}-")]
    if found:
        return found[-1]
    there = ", ".join(path.name for path in _checkpoints(folder)) or "none"
    wanted = "no checkpoint" if step is None else f"no checkpoint of step {step}"
    raise CheckpointError(f"load_checkpoint: {folder} has {wanted}; there is: {there}\n"
                          "  remedy: start from the beginning if latest_checkpoint(folder) is None")  # fmt: skip


def make_unfinished(folder: Path, step: int) -> Path:
    """Create a folder for this save only: other jobs may be saving here, too."""
    new = folder / f"{_UNFINISHED}{step}-{secrets.token_hex(8)}"
    new.mkdir(parents=True)
    now = new.stat().st_mtime  # the clock of the file system may differ from ours
    for left in folder.glob(f"{_UNFINISHED}*"):
        if now - _last_written(left) > _ABANDONED_SECONDS:
            shutil.rmtree(left, ignore_errors=True)
    return new


def check_shared(path: Path) -> None:
    """Check that this rank sees the folder that the first rank has created or found."""
    if not path.is_dir():
        raise CheckpointError(
            f"checkpoint: {gethostname()} does not see the folder {path}, which the first rank sees\n"
            "  remedy: a folder that is shared between all hosts"
        )


def publish(unfinished: Path, step: int) -> Path:
    """Rename a complete checkpoint to its final name. An existing one with that name is not touched."""
    folder = unfinished.parent
    flush(unfinished)
    target, number = folder / _named(step), 1
    while True:
        try:
            if target.exists():
                raise FileExistsError(target)
            unfinished.rename(target)
            break
        except OSError:
            if not target.exists():
                raise
            target, number = folder / f"{_named(step)}-{number}", number + 1
    flush(folder)
    return target


def remove_old(new: Path, keep: int) -> None:
    """Remove all but the last `keep` checkpoints; `new` is one of those that stay."""
    others = [path for path in _checkpoints(new.parent) if path != new]
    for old in others[: max(0, len(others) - keep + 1)]:
        try:
            # Rename it first, so that a partly removed one does not count.
            shutil.rmtree(old.rename(new.parent / f"{_UNFINISHED}{old.name}-{secrets.token_hex(8)}"))
        except OSError as error:
            log.warning("the old checkpoint %s could not be removed: %s", old, error)


def flush(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _checkpoints(folder: Path) -> list[Path]:
    """Return the checkpoints by step, and of one step in the order of writing."""
    named = [(match, path) for path in folder.glob("step-*") if (match := _NAME.fullmatch(path.name))]
    return [path for _, path in sorted(((int(m[1]), int(m[2] or 0)), path) for m, path in named)]


def _named(step: int) -> str:
    return f"step-{step:09d}"


def _last_written(folder: Path) -> float:
    try:
        return max(path.stat().st_mtime for path in (folder, *folder.iterdir()))
    except OSError:
        return float("inf")  # another job has just finished or removed it
