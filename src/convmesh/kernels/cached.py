"""The compiled library in the user's cache: compiled once per machine, and kept if its results agree with torch."""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist
from filelock import FileLock

from ..user_cache import cache_directory, make_private, trusted
from . import compiler, norms, openmp

SYMBOLS = (
    *("convmesh_take_threads", "convmesh_vector_bytes"),
    *(
        f"convmesh_{function}_{number}"
        for function in ("direct", "winograd", *norms.ARGUMENTS)
        for number in ("float32", "float64")
    ),
)
# What a compiler says when the code is not to blame: it is tried again at the next start.
NOT_THE_CODE = re.compile(
    "No space left|quota exceeded|Read-only file system|[Kk]illed|[Oo]ut of memory|allocate memory"
)

log = logging.getLogger("convmesh.kernels")

Check = Callable[[ctypes.CDLL], bool]


class UnusableError(RuntimeError):
    """The library cannot be used, and trying again would not help."""


def load(agrees_with_torch: Check) -> ctypes.CDLL | None:
    """Return the library, or None (with a line in the log) if there is none."""
    if os.environ.get("CONVMESH_KERNELS") == "0" or sys.platform != "linux":
        log.info("no kernels for CPUs: CONVMESH_KERNELS is 0, or this is not Linux")
        return None
    try:
        return _found_or_made(agrees_with_torch)
    except (OSError, RuntimeError, subprocess.SubprocessError) as error:
        log.log(_level(), "no kernels for CPUs, torch's operators are used: %s", _reason(error))
    return None


def _level() -> int:
    """Return the log level: a warning on one rank of each machine only, since the others would log the same."""
    of_all = dist.get_rank() if dist.is_available() and dist.is_initialized() else 0
    return logging.WARNING if os.environ.get("LOCAL_RANK", str(of_all)) == "0" else logging.INFO


def _reason(error: Exception) -> str:
    if isinstance(error, subprocess.CalledProcessError):
        return f"{error.cmd[0]} says {error.stderr.strip()}"
    return str(error)


def _found_or_made(agrees_with_torch: Check) -> ctypes.CDLL:
    make_private(cache_directory())
    path = trusted(cache_directory()) / f"kernels-{compiler.identity()}.so"
    if (library := _found(path, agrees_with_torch)) is not None:
        return library
    by = compiler.find()
    circumstances = _circumstances(by)
    with _one_at_a_time(path.with_suffix(".lock")):
        if (library := _found(path, agrees_with_torch)) is not None:
            return library  # which another rank has made
        failure = path.with_suffix(".failed")
        if (reason := _remembered(failure, circumstances)) is not None:
            raise RuntimeError(f"{reason} (as {failure} says; without that file it is tried again)")
        log.info("compiling kernels with %s, once for this machine", by)
        try:
            return _made(path, by, agrees_with_torch)
        except (UnusableError, subprocess.SubprocessError) as error:
            if not NOT_THE_CODE.search(_reason(error)):
                failure.write_text(f"{circumstances}\n{_reason(error)}")
            raise


@contextmanager
def _one_at_a_time(path: Path) -> Iterator[None]:
    """Let one process compile while others wait: all ranks that share a home directory need the library at once.

    On file systems without locks, each compiles its own.
    """
    lock = FileLock(path, timeout=compiler.LONGEST, mode=0o600)
    try:
        lock.acquire()
    except OSError as error:  # a TimeoutError, too
        log.info("kernels are made without a lock: %s", error)
    try:
        yield
    finally:
        lock.release()


def _circumstances(by: str) -> str:
    """Return a digest of what a failure may depend on besides the code: compiler, torch and OpenMP."""
    known = (by, compiler.version(by), torch.__version__, str(openmp.loaded()))
    return hashlib.sha256("\n".join(known).encode()).hexdigest()


def _remembered(failure: Path, circumstances: str) -> str | None:
    """Return why compiling has failed before under the same circumstances, or None."""
    if not failure.is_file():
        return None
    then, _, reason = failure.read_text().partition("\n")
    return reason if then == circumstances else None


def _found(path: Path, agrees_with_torch: Check) -> ctypes.CDLL | None:
    """Return the library in the cache; None if there is none, or it cannot be used."""
    if not path.exists():
        return None
    try:
        return _opened(trusted(path), agrees_with_torch)
    except UnusableError as error:
        log.info("%s is made anew: %s", path, error)
        return None


def _made(path: Path, by: str, agrees_with_torch: Check) -> ctypes.CDLL:
    """Compile and test the library, then move it into the cache atomically."""
    with compiler.compiled(by, path.parent) as made:
        library = _opened(made, agrees_with_torch)
        made.replace(path)
    return library


def _opened(path: Path, agrees_with_torch: Check) -> ctypes.CDLL:
    try:
        library = ctypes.CDLL(str(path))
    except OSError as error:
        raise UnusableError(f"it cannot be loaded: {error}") from error
    missing = [name for name in SYMBOLS if not hasattr(library, name)]
    if missing:
        raise UnusableError(f"it lacks {', '.join(missing)}")
    library.convmesh_take_threads(ctypes.byref(openmp.team()))
    if not agrees_with_torch(library):
        raise UnusableError("what was compiled gives other results than torch")
    return library
