"""Making a library of the C++ files of this directory, once for a machine and its compiler."""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import platform
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

from ..user_cache import cache_directory

SOURCES = Path(__file__).parent
# The machine's own instructions; sums of products may be fused, and nobody looks at errno or at traps.
FLAGS = ("-O3", "-std=c++17", "-fPIC", "-march=native", "-fno-math-errno", "-fno-trapping-math")
LONGEST = 300  # seconds

log = logging.getLogger("convmesh.kernels")


def load() -> ctypes.CDLL | None:
    """The library, compiled now if it was not before; None, and a line in the log, where that cannot be."""
    try:
        if os.environ.get("CONVMESH_KERNELS") == "0":
            raise RuntimeError("CONVMESH_KERNELS is 0")
        compiler, threading = _compiler(), _openmp()
        path = cache_directory() / f"kernels-{_identity(compiler, threading)}.so"
        path.parent.mkdir(parents=True, exist_ok=True)
        with _one_at_a_time(path.parent):
            if not path.is_file():
                log.info("compiling kernels with %s, once for this machine", compiler)
                _compile(compiler, threading, path)
        return ctypes.CDLL(str(path))
    except subprocess.CalledProcessError as error:
        log.warning("no kernels for CPUs: %s says %s", error.cmd[0], error.stderr)
    except (OSError, RuntimeError, subprocess.SubprocessError) as error:
        log.info("no kernels for CPUs: %s", error)
    return None


@contextmanager
def _one_at_a_time(directory: Path) -> Iterator[None]:
    """All ranks of a machine want the library at once: the first one makes it, and the others wait. Where a file system
    knows no locks, each makes its own."""
    import fcntl

    descriptor = os.open(directory, os.O_RDONLY)
    try:
        with suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _compiler() -> str:
    for name in (os.environ.get("CXX"), "c++", "g++", "clang++"):
        if name and (found := shutil.which(name)):
            return found
    raise RuntimeError("there is no C++ compiler ($CXX, c++, g++ or clang++)")


def _openmp() -> Path:
    """The library whose threads torch has: those of another one would be in their way."""
    try:
        mapped = Path("/proc/self/maps").read_text()
    except OSError as error:
        raise RuntimeError("only Linux says which library for threads torch has loaded") from error
    found = re.findall(r"/.*/lib[gi]omp.*", mapped)
    if not found:
        raise RuntimeError("torch has loaded no OpenMP")
    return Path(next((path for path in found if "torch" in path), found[0]))


def _identity(compiler: str, threading: Path) -> str:
    """All that a compiled library depends on: a home directory may be that of several machines."""
    digest = hashlib.sha256()
    for source in sorted((*SOURCES.glob("*.h"), *SOURCES.glob("*.cpp"))):
        digest.update(source.read_bytes())
    version = subprocess.run([compiler, "--version"], capture_output=True, check=True, timeout=LONGEST).stdout
    digest.update(version + " ".join((*FLAGS, str(threading), platform.machine(), _processor())).encode())
    return digest.hexdigest()[:16]


def _processor() -> str:
    """What it is and can do."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return "\n".join(sorted({line for line in lines if re.match(r"(model name|flags|Features|CPU part)\s*:", line)}))


def _compile(compiler: str, threading: Path, path: Path) -> None:
    """Whole or not at all: another process may be about to load it."""
    with tempfile.TemporaryDirectory(dir=path.parent) as directory:
        sources = {source: f"{directory}/{source.stem}.o" for source in SOURCES.glob("*.cpp")}
        commands = [[compiler, *FLAGS, "-fopenmp", "-c", str(source), "-o", made] for source, made in sources.items()]
        with ThreadPoolExecutor() as side_by_side:
            list(side_by_side.map(_run, commands))
        made = Path(directory) / path.name
        _run([compiler, "-shared", *sources.values(), str(threading), "-o", str(made)])
        made.replace(path)


def _run(command: Sequence[str]) -> None:
    subprocess.run(command, capture_output=True, text=True, check=True, timeout=LONGEST)
