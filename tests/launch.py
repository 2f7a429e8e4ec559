"""Ranks that may die: one set of processes for one call, unlike the pool, whose processes have to live on.

They are forked from a server that has imported torch already, so that a set starts in well under a second.
"""

from __future__ import annotations

import multiprocessing as mp
import os
import socket
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from math import prod
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from tests import accelerator
from tests.worker import pack, unpack

GROUP_SECONDS = 60.0
LIMIT_SECONDS = 120.0

FORK_SERVER = mp.get_context("forkserver")
FORK_SERVER.set_forkserver_preload(["convmesh", "torch._dynamo", "tests.launch"])


@dataclass(frozen=True)
class Outcome:
    """How a rank ended: with a result, with an exception, or with neither, because it was killed or had not ended."""

    result: Any = None
    error: str | None = None  # the exception's class
    message: str = ""
    exit_code: int | None = None  # None: it was still running when the call was over


def launch(
    fn: Callable[..., Any],
    *args: Any,
    mesh: Sequence[int] = (2, 2),
    names: Sequence[str] = ("h", "w"),
    group_seconds: float = GROUP_SECONDS,
    limit: float = LIMIT_SECONDS,
    backend: str | None = "gloo",
) -> list[Outcome]:
    """Run the module-level `fn(mesh, *args)` on new processes, and say how each of them ended.

    `group_seconds` is the time-out that is given to `init_process_group`, and so is `backend`, which may be the
    stand-in for NCCL (`tests/accelerator`): then the mesh is one of its devices; None leaves it to PyTorch. The call is
    over when every rank has ended or is stopped by a signal, at the latest after `limit` seconds; what still runs then
    is killed.
    """
    world = prod(mesh)
    store = dist.TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=LIMIT_SECONDS), wait_for_workers=False)
    started: list[tuple[Any, Connection]] = []
    for rank in range(world):
        here, there = FORK_SERVER.Pipe(duplex=False)
        task = (fn, args, tuple(mesh), tuple(names), group_seconds, backend)
        process = FORK_SERVER.Process(target=_rank, args=(rank, world, store.port, there, task), daemon=True)
        process.start()
        there.close()
        started.append((process, here))
    deadline = time.monotonic() + limit
    while running := [process.sentinel for process, _ in started if process.is_alive() and not _stopped(process.pid)]:
        if time.monotonic() > deadline:
            break
        wait(running, timeout=0.5)
    outcomes = [_outcome(process, pipe) for process, pipe in started]
    for process, _ in started:
        process.kill()
        process.join()
    return outcomes


def _stopped(pid: int) -> bool:
    """By SIGSTOP: it will not end by itself."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
    except OSError:
        return False  # it has just ended


def _outcome(process: Any, pipe: Connection) -> Outcome:
    try:
        said = unpack(pipe.recv_bytes()) if pipe.poll() else Outcome()
    except EOFError:
        said = Outcome()
    return replace(said, exit_code=process.exitcode)


def _rank(rank: int, world: int, port: int, pipe: Connection, task: tuple[Any, ...]) -> None:
    fn, args, mesh, names, seconds, backend = task
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = next(name for _, name in socket.if_nameindex() if name.startswith("lo"))
    store = dist.TCPStore("127.0.0.1", port, None, False, timedelta(seconds=LIMIT_SECONDS))
    if backend == accelerator.BACKEND:
        accelerator.install()
    dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=timedelta(seconds=seconds))
    torch.manual_seed(0)
    device = accelerator.DEVICE if backend == accelerator.BACKEND else "cpu"
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            result = fn(init_device_mesh(device, tuple(mesh), mesh_dim_names=tuple(names)), *args)
        pipe.send_bytes(pack(Outcome(result)))
    except Exception as error:
        text = "".join(traceback.format_exception(error))
        pipe.send_bytes(pack(Outcome(error=type(error).__name__, message=text)))
        os._exit(1)
    os._exit(0)
