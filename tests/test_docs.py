"""The documentation: every script, command, example and picture in it is run, and does what the text says.

In a page a `python` block that begins with a comment `# name.py` is a file; other `python` blocks of a page are run one
after the other on four ranks. A `shell` block is run where the files of its page are, and a `text` block right after it
is what it prints. Other languages are not run.
"""

from __future__ import annotations

import doctest
import inspect
import io
import os
import re
import runpy
import shlex
import tomllib
from collections.abc import Callable
from contextlib import redirect_stdout
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import benchmarks.__main__ as benchmarks
import convmesh
from convmesh import cli
from tests.harness import Pool
from tests.launch import FORK_SERVER, LIMIT_SECONDS
from tests.worker import loopback

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
MOST_RANKS = 4  # a command for 8 GPUs is run on so many processes


@dataclass(frozen=True)
class Block:
    language: str
    text: str

    @property
    def file(self) -> str | None:
        found = re.match(r"# (\w+\.py)\n", self.text)
        return found[1] if found and self.language == "python" else None


def blocks(page: Path) -> list[Block]:
    return [Block(*found) for found in re.findall(r"^```(\w+)\n(.*?)^```$", page.read_text(), re.DOTALL | re.MULTILINE)]


OF_OTHERS = ("ecosystem", "sliding-windows")  # whose packages `make compat` has not


def pages_with(found: Callable[[Path], object]) -> list[Any]:
    return [
        pytest.param(page, id=page.stem, marks=[pytest.mark.slow] if page.stem in OF_OTHERS else [])
        for page in PAGES
        if found(page)
    ]


# What an example may use without importing it, beside `mesh`.
NAMES = {"convmesh": convmesh, "torch": torch, "nn": nn, "F": F, "dist": dist}


# Commands


def run(command: list[str], folder: Path) -> str:
    """What it prints. A script that comes with the repository has a test of its own."""
    match command:
        case ["make", target]:
            assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.MULTILINE)
        case ["pip", "install", "."]:
            pass  # test_install.py
        case ["python", "-m", "benchmarks", suite]:
            assert suite in benchmarks.SUITES
        case ["torchrun", "--standalone", "--nproc-per-node", _, script, *_] if script.startswith("examples/"):
            assert (ROOT / script).exists()  # test_examples.py runs them
        case ["torchrun", "--standalone", "--nproc-per-node", ranks, script]:
            return _output(script, folder, min(int(ranks), MOST_RANKS))
        case ["convmesh", *arguments]:
            assert cli.main(arguments) == 0
        case ["python", script]:
            return _output(script, folder)
        case _:
            pytest.fail(f"no test for {shlex.join(command)}")
    return ""


def _output(script: str, folder: Path, ranks: int | None = None) -> str:
    """What a script prints that torchrun starts on so many ranks, or that is started by itself; here it is forked."""
    store = dist.TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=LIMIT_SECONDS), wait_for_workers=False)
    printed, errors = folder / "printed", folder / "errors"
    for file in (printed, errors):
        file.write_text("")
    started = [
        FORK_SERVER.Process(target=_rank, args=(rank, ranks, store.port, folder, script), daemon=True)
        for rank in range(ranks or 1)
    ]
    for process in started:
        process.start()
    for process in started:
        process.join(LIMIT_SECONDS)
    assert [process.exitcode for process in started] == [0] * len(started), printed.read_text() + errors.read_text()
    return printed.read_text()


def _rank(rank: int, ranks: int | None, port: int, folder: Path, script: str) -> None:
    """With the environment that torchrun gives a rank."""
    for number, name in ((1, "printed"), (2, "errors")):
        os.dup2(os.open(folder / name, os.O_WRONLY | os.O_APPEND), number)
    if ranks is not None:
        os.environ |= {
            "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks),
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "True",
            "GLOO_SOCKET_IFNAME": loopback(),
        }  # fmt: skip
    torch.set_num_threads(1)
    os.chdir(folder)
    runpy.run_path(script, run_name="__main__")


def commands(page: Path) -> list[str]:
    return [line for block in blocks(page) if block.language == "shell" for line in block.text.splitlines()]


@pytest.mark.parametrize("page", pages_with(commands))
def test_commands_run_and_print_what_the_page_says(page: Path, tmp_path: Path) -> None:
    found = blocks(page)
    for block in found:
        if block.file:
            (tmp_path / block.file).write_text(block.text)
    for block, after in zip(found, [*found[1:], None], strict=True):
        if block.language == "shell":
            printed = [run(shlex.split(line), tmp_path) for line in block.text.splitlines()]
            if after is not None and after.language == "text":
                assert printed == [after.text]


# Fragments


def run_fragments(mesh: DeviceMesh, page: Path) -> None:
    names = {**NAMES, "mesh": mesh}
    with redirect_stdout(io.StringIO()):
        for number, block in enumerate(blocks(page)):
            if block.language == "python" and not block.file:
                exec(compile(block.text, f"{page.name}, block {number}", "exec"), names)


def fragments(page: Path) -> bool:
    return any(block.language == "python" and not block.file for block in blocks(page))


@pytest.mark.parametrize("page", pages_with(fragments))
def test_fragments_run(pool: Pool, page: Path) -> None:
    pool.run(run_fragments, page, mesh=(2, 2), names=("data", "h"))


# Docstrings

PUBLIC = {name: value for name, value in vars(convmesh).items() if name[0] != "_" and callable(value)}
NO_EXAMPLE = {
    "CheckpointError": "docs/reliability.md",
    "CommunicationError": "ends the process",
    "MismatchError": "docs/debugging.md",
}


def run_examples(mesh: DeviceMesh, name: str, folder: Path) -> str:
    (test,) = doctest.DocTestFinder(recurse=False).find(PUBLIC[name], name, module=False, globs={**NAMES, "mesh": mesh})
    os.chdir(folder)
    printed = io.StringIO()
    doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(test, out=printed.write)
    return printed.getvalue()


@pytest.mark.parametrize("name", sorted(PUBLIC.keys() - NO_EXAMPLE.keys()))
def test_examples_of_docstrings(pool: Pool, name: str, tmp_path: Path) -> None:
    assert ">>> " in (PUBLIC[name].__doc__ or "")
    assert pool.run(run_examples, name, tmp_path, mesh=(2, 2), names=("data", "h")) == [""] * 4


def test_every_argument_is_described_and_every_public_name_is_on_the_page() -> None:
    shown = re.findall(r"^::: convmesh\.(?:\w+\.)*(\w+)$", (ROOT / "docs" / "api.md").read_text(), re.MULTILINE)
    assert PUBLIC.keys() <= set(shown)
    for name, value in PUBLIC.items():
        if inspect.isfunction(value):
            for argument in inspect.signature(value).parameters.values():
                assert re.search(rf"^ +\**{argument.name}: ", value.__doc__ or "", re.MULTILINE), (name, argument.name)


# The pages themselves


def test_readme_is_short_and_names_the_two_commands() -> None:
    text = (ROOT / "README.md").read_text()
    assert len(text.splitlines()) <= 120
    assert "`make demo`" in text
    assert "`make test`" in text
    for link in re.findall(r"\]\(([^)#]+)", text):
        assert (ROOT / link).exists(), link


def test_extras_that_pages_name_exist() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for page in PAGES:
        assert set(re.findall(r"convmesh\[(\w+)\]", page.read_text())) <= extras.keys()


def test_pictures_are_drawn_from_the_library(tmp_path: Path) -> None:
    (tmp_path / "images").mkdir()
    (tmp_path / "draw.py").write_text((ROOT / "docs" / "draw.py").read_text())
    _output("draw.py", tmp_path)
    for drawn in (tmp_path / "images").iterdir():
        assert drawn.read_text() == (ROOT / "docs" / "images" / drawn.name).read_text(), "python docs/draw.py"


def test_the_glossary_has_few_words() -> None:
    rows = re.findall(r"^\| (?!word)\w", (ROOT / "docs" / "glossary.md").read_text(), re.MULTILINE)
    assert 0 < len(rows) <= 30
