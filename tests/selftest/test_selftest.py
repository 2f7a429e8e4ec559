"""`convmesh selftest` on ranks of this machine: what is right, and what is not."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from socket import socket

import pytest

from convmesh.cli import main

TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    command = [sys.executable, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=600, check=False, env=environment)


@pytest.mark.long("new processes compare every family in two dtypes, and train")
def test_it_starts_ranks_and_finds_everything_right(tmp_path: Path) -> None:
    done = run("-m", "convmesh", "selftest", "--quick", "--out", str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Starting 2 ranks" in done.stdout
    text, html = ((tmp_path / f"report.{kind}").read_text() for kind in ("txt", "html"))
    for part in ("13 operator families", "torch 2.", "gloo", "Halos between neighbours", "Overlap", "U-Net step"):
        assert part in text
        assert part in html
    assert "wrong" not in text
    assert "<svg" in html or 'class="bars"' in html
    figures = json.loads((tmp_path / "device.json").read_text())
    assert figures["flops"]["float32"] > 0
    assert figures["node_ranks"] == 2
    assert figures["network"] == figures["node"], "there is one host"
    assert figures["node"]["bandwidth"] > 0


def test_functions_that_there_are_not(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["selftest", "--only", "convolution", "no_such"]) == 2
    assert "no function no_such; there are max_pool, " in capsys.readouterr().err


def test_a_wrong_operator_is_found(tmp_path: Path) -> None:
    done = run(*TORCHRUN, "-m", "tests.selftest.broken", str(tmp_path))
    assert done.returncode != 0
    found = [line for line in (tmp_path / "report.txt").read_text().splitlines() if line.startswith("wrong")]
    assert {line.split()[1] for line in found} == {"avg_pool", "lp_pool"}, "which are made of it"
    assert "Something is wrong" in (tmp_path / "report.html").read_text()


def test_on_an_accelerator(tmp_path: Path) -> None:
    """Each rank is a host by itself, with one device."""
    with socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    ranks = []
    for rank in ("0", "1"):
        place = {"RANK": rank, "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "GROUP_RANK": rank}
        environment = {**os.environ, **place, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "tests.selftest.on_accelerator", str(tmp_path)]
        output = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        ranks.append(subprocess.Popen(command, env=environment, **output))  # type: ignore[call-overload]
    said = [rank.communicate(timeout=600)[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], "\n".join(said)
    text = (tmp_path / "report.txt").read_text()
    assert "2 ranks on 2 hosts, acc, accl" in text
    assert "wrong" not in text
    figures = json.loads((tmp_path / "device.json").read_text())
    assert (figures["node_ranks"], figures["memory"]) == (1, 2**30)
