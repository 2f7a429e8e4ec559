"""Files of measurements in the user's cache: one for each kind, processor, number of threads and version.

Only speed depends on them: a file that cannot be read is logged and ignored.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import platform
from collections.abc import Mapping
from contextlib import suppress
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from ..user_cache import cache_directory, make_private
from . import compiler

log = logging.getLogger("convmesh.kernels")

# Errors of files with any content. A RuntimeError comes from endlessly nested lists, or from a missing home directory.
UNREADABLE = (OSError, ValueError, TypeError, AttributeError, RuntimeError)


def read(kind: str, threads: int) -> dict[str, Any]:
    """Return the measurements; empty if there are none, or the file cannot be read."""
    path = None
    with suppress(OSError, RuntimeError):  # a home directory that is not there, or cannot be looked into
        path = path_of(kind, threads) if path_of(kind, threads).is_file() else None
    if path is None:
        return {}
    try:
        found = json.loads(path.read_text())
        if isinstance(found, dict):
            return found
        raise ValueError(f"{path} holds no table")
    except UNREADABLE as error:
        log.warning("measurements cannot be read, and are left alone: %r", error)
        return {}


def add(kind: str, threads: int, entries: Mapping[str, Any]) -> Path | None:
    """Add measurements to the file, atomically, and return its path; None if it cannot be written."""
    try:
        path = path_of(kind, threads)
        make_private(path.parent)
        unfinished = path.with_suffix(f".{os.getpid()}")
        unfinished.write_text(json.dumps({**read(kind, threads), **entries}, indent=1, sort_keys=True) + "\n")
        return unfinished.replace(path)
    except UNREADABLE as error:
        log.warning("measurements are not kept: %r", error)
        return None


def path_of(kind: str, threads: int) -> Path:
    return cache_directory() / f"{kind}-{_machine()}-{threads}.json"


@lru_cache(maxsize=1)
def _machine() -> str:
    """Return a digest of the processor, the instructions that torch uses, and the versions."""
    try:
        processor = compiler.processor()
    except OSError:  # another system than Linux
        processor = f"{platform.machine()} {platform.processor()}"
    try:
        own = version("convmesh")
    except PackageNotFoundError:
        own = ""
    known = processor, torch.backends.cpu.get_cpu_capability(), torch.__version__, own
    return hashlib.sha256("\n".join(known).encode()).hexdigest()[:16]
