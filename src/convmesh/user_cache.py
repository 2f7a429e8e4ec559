"""Where things are kept that are made once for a machine, and whether somebody else could have put them there."""

from __future__ import annotations

import os
import stat
from contextlib import suppress
from pathlib import Path

import platformdirs

OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
MOST_STEPS = 1000


def cache_directory() -> Path:
    """$CONVMESH_CACHE, or else a directory in the user's cache: of $XDG_CACHE_HOME, or of ~/.cache."""
    if wanted := os.environ.get("CONVMESH_CACHE"):
        return Path(wanted).absolute()
    with suppress(RuntimeError):  # which newer releases raise, while older ones leave the ~ in the path
        if (directory := platformdirs.user_cache_path("convmesh")).is_absolute():
            return directory
    raise FileNotFoundError("there is no home directory, and CONVMESH_CACHE is not set")


def make_private(directory: Path) -> None:
    """What is missing of a path, for its user alone whatever the umask."""
    if not directory.is_dir():
        make_private(directory.parent)
        directory.mkdir(mode=0o700, exist_ok=True)


def trusted(path: Path) -> Path:
    """An absolute path without its symbolic links; refused unless it is this user's, or root's, and theirs alone.

    That is asked at every step of the way, links included: who can rename a directory decides what is in it. A sticky
    directory (/tmp) may be on the way, because nobody can rename there what belongs to another.
    """
    here, ahead = Path("/"), [*reversed(path.parts[1:])]
    mine = {os.geteuid(), 0}
    on_the_way = mine | {os.stat("/").st_uid}  # root by another name, where a container does not know it
    for _ in range(MOST_STEPS):
        if not ahead:
            return here
        if (name := ahead.pop()) == "..":
            here = here.parent
            continue
        step = here / name
        found = os.lstat(step)
        if found.st_uid not in (on_the_way if ahead else mine):
            raise PermissionError(f"{step} belongs to another user")
        if stat.S_ISLNK(found.st_mode):
            target = Path(os.readlink(step))
            here = Path("/") if target.is_absolute() else here
            ahead += [part for part in reversed(target.parts) if part != "/"]
            continue
        if found.st_mode & OTHERS_WRITE and not (ahead and found.st_mode & stat.S_ISVTX):
            raise PermissionError(f"others can write to {step} (`chmod go-w` would end that)")
        here = step
    raise OSError(f"too many symbolic links on the way to {path}")
