"""Compiling: once, whole or not at all, and never an error for those who have no compiler."""

from __future__ import annotations

import logging
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from convmesh.kernels import compiler


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> Path:
    monkeypatch.setenv("CONVMESH_CACHE", str(tmp_path))
    caplog.set_level(logging.INFO, "convmesh.kernels")
    return tmp_path


def test_it_is_done_once(cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    library = compiler.load()
    assert library is not None
    assert hasattr(library, "convmesh_direct_float32")
    assert "once for this machine" in caplog.text
    assert [path.suffix for path in cache.iterdir()] == [".so"]
    monkeypatch.setattr(compiler, "_compile", lambda *_: pytest.fail("compiled again"))
    assert compiler.load() is not None


def test_who_wants_it_at_the_same_time_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[Path] = []

    def slowly(_compiler: str, _threading: Path, path: Path) -> None:
        compiled.append(path)
        time.sleep(0.3)
        path.write_bytes(b"")

    monkeypatch.setattr(compiler, "_compile", slowly)
    monkeypatch.setattr(compiler.ctypes, "CDLL", str)
    with ThreadPoolExecutor(3) as ranks:
        found = list(ranks.map(lambda _: compiler.load(), range(3)))
    assert len(compiled) == 1
    assert found == [str(compiled[0])] * 3


def test_no_compiler(cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv("PATH", str(cache))
    monkeypatch.delenv("CXX", raising=False)
    assert compiler.load() is None
    assert "there is no C++ compiler" in caplog.text


def test_not_wanted(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv("CONVMESH_KERNELS", "0")
    assert compiler.load() is None
    assert "CONVMESH_KERNELS is 0" in caplog.text


def test_a_compiler_that_fails_is_quoted(
    cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(compiler, "FLAGS", ("--no-such-flag",))
    assert compiler.load() is None
    assert "no-such-flag" in caplog.text
    assert list(cache.iterdir()) == []


def test_nowhere_to_keep_it(cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    (cache / "file").write_text("")
    monkeypatch.setenv("CONVMESH_CACHE", str(cache / "file" / "directory"))
    assert compiler.load() is None
    assert "no kernels for CPUs" in caplog.text


def test_another_processor_gets_another_library(monkeypatch: pytest.MonkeyPatch) -> None:
    found = compiler._compiler(), compiler._openmp()
    here = compiler._identity(*found)
    monkeypatch.setattr(compiler, "_processor", lambda: "another one")
    assert compiler._identity(*found) != here
