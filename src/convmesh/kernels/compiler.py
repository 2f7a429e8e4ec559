"""Compiling the C++ files of this directory into a shared library."""

from __future__ import annotations

import hashlib
import os
import platform
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import torch

SOURCES = Path(__file__).parent
# All instructions of this machine; products and sums may be fused. errno, traps and exceptions are not used (the newest
# exception functions are not in every libstdc++).
FLAGS = (
    *("-O3", "-std=c++17", "-fPIC", "-march=native", "-ffp-contract=fast"),
    *("-fno-math-errno", "-fno-trapping-math", "-fno-exceptions"),
    # Where torch was told to do without the longest vectors (ATEN_CPU_CAPABILITY=avx2), so do we.
    *(("-mno-avx512f",) if torch.backends.cpu.get_cpu_capability() == "AVX2" else ()),
)
LONGEST = 300  # seconds


def identity() -> str:
    """Return a digest of sources, flags and machine: several machines may share one home directory."""
    digest = hashlib.sha256()
    for source in sorted((*SOURCES.glob("*.h"), *SOURCES.glob("*.cpp"))):
        digest.update(source.read_bytes())
    machine = (platform.machine(), *platform.libc_ver(), processor())
    digest.update(" ".join((*FLAGS, *machine, os.environ.get("CXX", ""))).encode())
    return digest.hexdigest()[:16]


def processor() -> str:
    """Return the processor's model and features."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return "\n".join(sorted({line for line in lines if re.match(r"(model name|flags|Features|CPU part)\s*:", line)}))


def find() -> str:
    for name in (os.environ.get("CXX"), "c++", "g++", "clang++"):
        if name and (found := shutil.which(name)):
            return found
    raise RuntimeError("there is no C++ compiler ($CXX, c++, g++ or clang++)")


def version(compiler: str) -> str:
    return _run([compiler, "--version"], os.environ)


@contextmanager
def compiled(compiler: str, directory: Path) -> Iterator[Path]:
    """Context manager that compiles the library in a temporary directory within `directory`, and gives its path."""
    with tempfile.TemporaryDirectory(dir=directory) as made:
        # Temporary files of the compiler go there, too, and its messages are in English.
        environment = {**os.environ, "TMPDIR": made, "LC_ALL": "C"}
        objects = {source: f"{made}/{source.stem}.o" for source in SOURCES.glob("*.cpp")}
        with ThreadPoolExecutor() as side_by_side:
            commands = ([compiler, *FLAGS, "-c", str(source), "-o", name] for source, name in objects.items())
            list(side_by_side.map(lambda command: _run(command, environment), commands))
        library = Path(made) / "kernels.so"
        _run([compiler, "-shared", *objects.values(), "-o", str(library)], environment)
        library.chmod(0o600)  # whatever the umask
        yield library


def _run(command: Sequence[str], environment: os._Environ[str] | dict[str, str]) -> str:
    ended = subprocess.run(command, capture_output=True, text=True, check=True, timeout=LONGEST, env=environment)
    return ended.stdout
