"""`python -m tests.hosts [number of a check ...]`: trainings on several hosts, some of which are lost on the way."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from tests.harness import PATIENCE
from tests.hosts.namespaces import Job, Network, obstacle

STEPS = 12
CUT_AT = 5  # with a checkpoint of step 4
TIMEOUT = 8.0 * PATIENCE  # of the process group
PAUSE = 0.5
LIMIT = 600.0  # on a machine that has other things to do
SCRIPT = str(Path(__file__).with_name("train.py"))

Rows = list[dict[str, Any]]


def rows(folder: Path) -> Rows:
    path = folder / "losses"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def alone(folder: Path) -> Rows:
    """What one process makes of it."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1"]
    log = subprocess.run([*launcher, SCRIPT, str(folder)], capture_output=True, text=True, check=False)
    assert log.returncode == 0, log.stderr
    return rows(folder)


def assert_same(found: Rows, expected: Rows) -> None:
    """Also of steps that were made twice."""
    losses = {row["step"]: row["loss"] for row in expected}
    assert {row["step"] for row in found} == set(losses), found
    for row in found:
        assert math.isclose(row["loss"], losses[row["step"]], rel_tol=1e-9), (row, losses[row["step"]])


def script(folder: Path, pause: float = 0.0) -> list[str]:
    return [SCRIPT, str(folder), "--timeout", str(TIMEOUT), "--pause", str(pause)]


def wait_for_step(folder: Path, step: int) -> None:
    deadline = time.monotonic() + LIMIT
    while not any(row["step"] >= step for row in rows(folder)):
        assert time.monotonic() < deadline, f"step {step} was not reached"
        time.sleep(0.1)


def trains_as_one_process(folder: Path, expected: Rows, hosts: int, processes: int) -> str:
    with Network(hosts, folder) as network:
        job = Job(network, str(hosts), processes, script(folder), folder)
        job.wait(LIMIT)
    found = rows(folder)
    assert_same(found, expected)
    assert {row["ranks"] for row in found} == {hosts * processes}
    # Along the last mesh dimension the ranks of a host are neighbours, if it has several.
    for row in found:
        assert row["shared"] == [False] * (len(row["shared"]) - 1) + [processes > 1], row
    return "memory is shared by the ranks of a host" if processes > 1 else "no memory is shared"


def loses(folder: Path, expected: Rows, hosts: int, nodes: str, lost: int, how: str, left: int) -> str:
    """One of the hosts, or its rank, in the middle: the others name it in time, and all that are left go on."""
    with Network(hosts, folder) as network:
        job = Job(network, nodes, 1, script(folder, PAUSE), folder)
        wait_for_step(folder, CUT_AT)
        since = time.monotonic()
        if how == "vanishes":
            network.vanish(lost)
        elif how == "is cut off":
            network.link(lost, "down")
        else:
            os.kill(_process_of(network, lost), signal.SIGSTOP)
        others = [number for number in range(hosts) if number != lost]
        seconds = _all_say_so(job, others, since)
        rank = (folder / f"rank-of-host{lost}").read_text()
        assert any(f"no word from: rank {rank}\n" in job.said(number) for number in others), job.said(others[0])
        if how == "is cut off":
            network.link(lost, "up")
        job.wait(LIMIT, but=lost if how == "vanishes" else None)
        job.end()
    assert_same(rows(folder), expected)
    assert rows(folder)[-1]["ranks"] == left, rows(folder)[-1]
    return f"all others knew after {seconds:.0f} s of a time-out of {TIMEOUT:.0f}"


def _process_of(network: Network, host: int) -> int:
    """The training process on a host, by this machine's numbers; torchrun has the script among its words, too."""
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):  # it has just ended
            words = path.read_bytes().split(b"\0")
            if SCRIPT.encode() in words and b"torch.distributed.run" not in words and network.runs(host, path.parent):
                return int(path.parent.name)
    raise AssertionError(f"host{host} runs nothing")


def _all_say_so(job: Job, hosts: list[int], since: float) -> float:
    """After the time-out, and what a busy machine needs to end processes; returns the seconds."""
    while missing := [number for number in hosts if "CommunicationError" not in job.said(number)]:
        late = time.monotonic() - since - TIMEOUT
        assert late < 3 * TIMEOUT, f"hosts {missing} have not noticed:\n{job.said(missing[0])[-4000:]}"
        time.sleep(0.2)
    return time.monotonic() - since


def checks(expected: Rows) -> Iterator[tuple[str, Callable[[Path], str]]]:
    yield "2 hosts with 2 ranks each", lambda folder: trains_as_one_process(folder, expected, 2, 2)
    yield "4 hosts with a rank each", lambda folder: trains_as_one_process(folder, expected, 4, 1)
    yield "a host vanishes, and 3 of 4 go on", lambda folder: loses(folder, expected, 4, "3:4", 2, "vanishes", 3)
    yield "a link goes down, and up again", lambda folder: loses(folder, expected, 2, "2", 1, "is cut off", 2)
    yield "a rank stops", lambda folder: loses(folder, expected, 2, "2", 1, "stops", 2)


def main() -> int:
    if why := obstacle():
        print(f"make hosts: not here: {why}", file=sys.stderr)
        return 2
    wanted = [int(number) for number in sys.argv[1:]]  # of the checks, from 1; all if none is named
    wrong = 0
    with tempfile.TemporaryDirectory(prefix="convmesh-hosts-") as root:
        (Path(root) / "alone").mkdir()
        expected = alone(Path(root) / "alone")
        for number, (what, check) in enumerate(checks(expected), 1):
            if wanted and number not in wanted:
                continue
            folder = Path(root) / str(number)
            folder.mkdir()
            start = time.monotonic()
            try:
                said = check(folder)
            except (AssertionError, subprocess.SubprocessError, RuntimeError) as error:
                wrong += 1
                print(f"WRONG  {what}: {error}", flush=True)
            else:
                print(f"right  {what}: {said} ({time.monotonic() - start:.0f} s)", flush=True)
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
