"""The library in the cache: found, or compiled once; never somebody else's, and never an error for those without."""

from __future__ import annotations

import logging
import os
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from convmesh import kernels
from convmesh.kernels import cached, compiler, library, measurements, openmp
from convmesh.user_cache import cache_directory
from tests.kernels.permissions import given_to_another, unprivileged


@pytest.fixture(scope="session")
def built() -> Path:
    """A library that is right: the one that all tests use."""
    assert kernels.available()
    return cache_directory() / f"kernels-{compiler.identity()}.so"


@pytest.fixture(autouse=True)
def cache(built: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> Path:
    """An empty one."""
    monkeypatch.setenv("CONVMESH_CACHE", str(tmp_path / "cache"))
    caplog.set_level(logging.INFO, "convmesh.kernels")
    return tmp_path / "cache"


class Compiler:
    """$CXX: a script that writes down what it is asked for, and does what it is told."""

    def __init__(self, directory: Path, built: Path):
        self.path, self.asked, self.built = directory / "c++", directory / "asked", built
        self.asked.touch()
        self.does(f"cp {built} $made")

    def does(self, action: str, version: str = "1") -> None:
        lines = ("#!/bin/sh", f'echo "$@" >> {self.asked}', f'test "$1" = --version && echo {version} && exit')
        self.path.write_text("\n".join((*lines, "for made; do :; done", action)))
        self.path.chmod(0o700)

    @property
    def linked(self) -> int:
        return self.asked.read_text().count("-shared")


@pytest.fixture
def cxx(built: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Compiler:
    found = Compiler(tmp_path, built)
    monkeypatch.setenv("CXX", str(found.path))
    return found


def load() -> object:
    return cached.load(library._agrees_with_torch)


def warnings_in(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def tries_in(caplog: pytest.LogCaptureFixture) -> int:
    return caplog.text.count("compiling kernels")


def test_it_is_compiled_once(cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    before = os.umask(0)
    try:
        assert load() is not None
    finally:
        os.umask(before)
    assert "once for this machine" in caplog.text
    assert {path.suffix: path.stat().st_mode & 0o777 for path in cache.iterdir()} == {".so": 0o600, ".lock": 0o600}
    assert cache.stat().st_mode & 0o777 == 0o700
    monkeypatch.setenv("PATH", str(cache))  # what is there is found without a compiler
    assert load() is not None
    assert not warnings_in(caplog)


def test_who_wants_it_at_the_same_time_waits(cxx: Compiler) -> None:
    cxx.does(f"sleep 0.2; cp {cxx.built} $made")
    with ThreadPoolExecutor(3) as ranks:
        assert None not in [*ranks.map(lambda _: load(), range(3))]
    assert cxx.linked == 1


def test_without_locks_each_makes_its_own(
    cxx: Compiler, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError("no locks available")

    monkeypatch.setattr(cached.FileLock, "acquire", refuse)
    assert load() is not None
    assert "no locks available" in caplog.text


@pytest.mark.parametrize("action", ["echo strange code >&2; exit 1", "echo > $made", "cp {other} $made"])
def test_a_failure_is_remembered_until_something_changes(
    action: str, cxx: Compiler, cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The compiler fails; what it makes cannot be loaded; or lacks what is asked of it."""
    cxx.does(action.format(other=openmp.loaded()))
    assert load() is load() is None
    assert tries_in(caplog) == 1
    first, second = warnings_in(caplog)
    assert first in second
    assert "without that file it is tried again" in second
    assert not [*cache.glob("*.so")]
    monkeypatch.setattr(openmp, "loaded", lambda: Path("/another/libgomp.so"))
    assert load() is None
    assert tries_in(caplog) == 2
    monkeypatch.undo()
    monkeypatch.setenv("CXX", str(cxx.path))
    monkeypatch.setenv("CONVMESH_CACHE", str(cache))
    cxx.does(f"cp {cxx.built} $made", version="2")
    assert load() is not None
    assert tries_in(caplog) == 3


@pytest.mark.parametrize("said", ["No space left on device", "Killed signal terminated program"])
def test_what_is_not_the_codes_fault_is_not_remembered(said: str, cxx: Compiler, cache: Path) -> None:
    cxx.does(f"echo {said} >&2; exit 1")
    assert load() is None
    cxx.does(f"cp {cxx.built} $made")
    assert load() is not None


@pytest.mark.parametrize("content", ["garbage", "another library"])
def test_one_of_no_use_is_made_anew(content: str, cxx: Compiler, cache: Path) -> None:
    assert load() is not None
    (kept,) = cache.glob("*.so")
    kept.unlink()
    kept.write_bytes(b"\x7fELF" if content == "garbage" else openmp.loaded().read_bytes())
    kept.chmod(0o600)
    assert load() is not None
    assert cxx.linked == 2


def test_one_that_is_wrong_is_made_anew_and_then_given_up(cxx: Compiler, caplog: pytest.LogCaptureFixture) -> None:
    assert load() is not None
    assert cached.load(lambda _: False) is cached.load(lambda _: False) is None
    assert cxx.linked == 2
    assert "other results than torch" in warnings_in(caplog)[0]


def plant(cache: Path, directory: Path) -> Path:
    """A library by the right name, which leaves a trace when it is loaded."""
    trace, source = directory / "trace", directory / "planted.c"
    source.write_text(f'#include <fcntl.h>\n__attribute__((constructor)) void f() {{ creat("{trace}", 0600); }}\n')
    cache.mkdir(mode=0o700)
    planted = cache / f"kernels-{compiler.identity()}.so"
    subprocess.run([compiler.find(), "-shared", "-fPIC", "-x", "c", str(source), "-o", str(planted)], check=True)
    planted.chmod(0o600)
    return trace


@pytest.mark.parametrize(
    "open_to_others", ["directory 777", "directory 770", "parent 777", "file 666", "directory's owner", "file's owner"]
)
def test_what_others_could_have_put_there_is_not_loaded(
    open_to_others: str,
    built: Path,
    tmp_path: Path,
    cache: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    trace = plant(cache, tmp_path)
    what, how = open_to_others.replace("'s", "").split()
    path = {"directory": cache, "parent": tmp_path, "file": next(cache.glob("*.so"))}[what]
    if how == "owner":
        given_to_another(path, monkeypatch)
    else:
        path.chmod(int(how, 8))
    assert load() is None
    assert not trace.exists()
    (line,) = warnings_in(caplog)
    assert "belongs to another user" in line if how == "owner" else f"others can write to {path}" in line


def test_no_compiler(cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv("PATH", str(cache))
    monkeypatch.delenv("CXX", raising=False)
    assert load() is None
    (line,) = warnings_in(caplog)
    assert "there is no C++ compiler" in line


def test_ranks_do_not_repeat_each_other(
    cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("PATH", str(cache))
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert load() is None
    assert "there is no C++ compiler" in caplog.text
    assert not warnings_in(caplog)


def test_not_wanted(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv("CONVMESH_KERNELS", "0")
    assert load() is None
    assert "CONVMESH_KERNELS is 0" in caplog.text
    assert not warnings_in(caplog)


@pytest.mark.parametrize("home", ["/dev/null/nowhere", "unreadable"])
def test_no_home(home: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    for name in ("CONVMESH_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    with unprivileged() as owned:
        closed = owned / "home"
        closed.mkdir(mode=0)
        monkeypatch.setenv("HOME", home if home != "unreadable" else str(closed))
        assert load() is None
        assert measurements.read("fastest", 1) == {}  # nor is there an error for those who ask what was measured
    assert len(warnings_in(caplog)) == 1


def test_a_cache_that_is_read_only(
    built: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    content = built.read_bytes()
    with unprivileged() as owned:
        monkeypatch.setenv("CONVMESH_CACHE", str(owned))
        owned.chmod(0o500)
        assert load() is None
        assert len(warnings_in(caplog)) == 1
        owned.chmod(0o700)
        (owned / f"kernels-{compiler.identity()}.so").write_bytes(content)
        owned.chmod(0o500)
        assert load() is not None
        owned.chmod(0o700)


def test_a_disk_that_is_full(cxx: Compiler, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    def full(*_: object, **__: object) -> str:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(compiler.tempfile, "mkdtemp", full)
    assert load() is None
    (line,) = warnings_in(caplog)
    assert "No space left" in line


def test_another_processor_gets_another_library(monkeypatch: pytest.MonkeyPatch) -> None:
    here = compiler.identity()
    monkeypatch.setattr(compiler, "processor", lambda: "another one")
    assert compiler.identity() != here
