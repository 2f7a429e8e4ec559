"""The cache directory of the user, and checks that only the user could have written to it."""

from __future__ import annotations

import os
import stat
from contextlib import suppress
from pathlib import Path

import platformdirs

OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
MOST_STEPS = 1000


def cache_directory() -> Path:
    """Return $CONVMESH_CACHE, or else a directory in the user's cache: of $XDG_CACHE_HOME, or ~/.cache."""
    if wanted := os.environ.get("CONVMESH_CACHE"):
        return Path(wanted).absolute()
    with suppress(RuntimeError):  # newer releases raise it, older ones leave the ~ in the path
        if (directory := platformdirs.user_cache_path("convmesh")).is_absolute():
            return directory
    raise FileNotFoundError("there is no home directory, and CONVMESH_CACHE is not set")


def make_private(directory: Path) -> None:
    """Create a directory and its missing parents, accessible to the user only, whatever the umask."""
    if not directory.is_dir():
        make_private(directory.parent)
        directory.mkdir(mode=0o700, exist_ok=True)


def trusted(path: Path) -> Path:
    """Resolve the symbolic links of an absolute path; refuse it unless only this user or root can write to it.

    Every step of the way is checked, links included: a user who can rename a directory decides what is in it. A sticky
    directory (/tmp) may be on the way, because only the owner of an entry can rename it there.
    """
    here, ahead = Path("/"), [*reversed(path.parts[1:])]
    mine = {os.geteuid(), 0}
    on_the_way = mine | {os.stat("/").st_uid}  # root under another id, as in some containers
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
