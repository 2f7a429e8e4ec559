"""The OpenMP library that torch has loaded. Kernels use its threads: those of a second library would compete."""

from __future__ import annotations

import ctypes
import os
import re
from pathlib import Path

# GCC's names; LLVM's and Intel's libraries have them as well.
FUNCTIONS = ("GOMP_parallel", "omp_get_thread_num", "omp_get_num_threads")


class Team(ctypes.Structure):
    """The struct of `threads.h`."""

    _fields_ = [(name, ctypes.c_void_p) for name in ("parallel", "number", "size")]


def loaded() -> Path:
    """Return its path."""
    found = re.findall(r"/.*/lib[gi]?omp\d*[-.].*", Path("/proc/self/maps").read_text())
    if not found:
        raise RuntimeError("torch has loaded no OpenMP")
    return Path(next((path for path in found if "torch" in path), found[0]))


def team() -> Team:
    path = loaded()
    library = ctypes.CDLL(str(path), os.RTLD_NOLOAD)
    if not all(hasattr(library, name) for name in FUNCTIONS):
        raise RuntimeError(f"{path} does not lend its threads ({', '.join(FUNCTIONS)})")
    return Team(*(ctypes.cast(getattr(library, name), ctypes.c_void_p) for name in FUNCTIONS))
