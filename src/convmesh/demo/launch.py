"""Running the training on new processes of this machine, or on those that torchrun has started."""

from __future__ import annotations

import multiprocessing as mp
import os
import pickle
import socket
import tempfile
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from .settings import AXES, DemoError, Settings, Shape, mesh_name
from .training import Run, train

Progress = Callable[[Shape | None, float | None], None]  # called when a run begins (None), then with each step's loss
SILENCE = 300  # seconds without a step after which a run is given up
# By default glibc may keep freed blocks below 32 MB in a fragmented heap, and the activations of a rank are smaller
# than those of one process. With this setting both return what they free, so that peaks can be compared.
ALLOCATION = {"MALLOC_MMAP_THRESHOLD_": str(1 << 20)}
WAIT_FOR_ONE = timedelta(hours=1)  # how long the other ranks wait while the first one trains alone


def spawn(settings: Settings, shape: Shape | None, progress: Progress) -> list[Run]:
    """Train on new processes, one for each place of the mesh. If one fails, all are killed, and the error says why."""
    context = mp.get_context("spawn")
    ranks = 1 if shape is None else shape[0] * shape[1]
    workers: list[tuple[BaseProcess, Connection]] = []
    with tempfile.TemporaryDirectory(prefix="convmesh-demo-") as folder:
        try:
            for rank in range(ranks):
                pipe, far_end = context.Pipe()
                arguments = (settings, shape, rank, str(Path(folder) / "store"), far_end)
                process: BaseProcess = context.Process(target=_work, args=arguments, daemon=True)
                with _environment(ALLOCATION):
                    process.start()
                far_end.close()  # else the pipe would outlive the process, and its death would go unnoticed
                workers.append((process, pipe))
            progress(shape, None)
            return _collect(workers, mesh_name(shape), lambda loss: progress(shape, loss))
        finally:
            for worker, near_end in workers:
                worker.kill()
                worker.join()
                near_end.close()


@contextmanager
def _environment(values: dict[str, str]) -> Iterator[None]:
    """Set environment variables for processes that start within the block."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _collect(workers: list[tuple[BaseProcess, Connection]], name: str, step: Callable[[float], None]) -> list[Run]:
    """Receive the results of all workers; call `step` with each loss of rank 0."""
    results: dict[int, Run] = {}
    while len(results) < len(workers):
        open_pipes = {pipe: rank for rank, (_, pipe) in enumerate(workers) if rank not in results}
        ready = wait(list(open_pipes), SILENCE)
        if not ready:
            raise DemoError(f"{name}: no rank has made a step for {SILENCE} seconds")
        for pipe, rank in open_pipes.items():
            if pipe not in ready:
                continue
            try:
                kind, value = pickle.loads(pipe.recv_bytes())
            except (EOFError, OSError):
                process = workers[rank][0]
                process.join(5)
                raise DemoError(f"{name}: rank {rank} died, exit code {process.exitcode}") from None
            if kind == "failed":
                raise DemoError(f"{name}: rank {rank} failed:\n{value}")
            if kind == "done":
                results[rank] = Run(**value)
            elif rank == 0:
                step(value)
    return [results[rank] for rank in range(len(workers))]


def _work(settings: Settings, shape: Shape | None, rank: int, store: str, pipe: Connection) -> None:
    """Run one process: send ("step", loss) after each step, then ("done", its run) or ("failed", why)."""

    def send(kind: str, value: Any) -> None:
        pipe.send_bytes(pickle.dumps((kind, value)))  # multiprocessing itself would send tensors through shared memory

    ranks = 1 if shape is None else shape[0] * shape[1]
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // ranks))
    try:
        mesh = None
        if shape is not None:
            loopback = next(name for _, name in socket.if_nameindex() if name.startswith("lo"))
            os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback)  # works even if the host name does not resolve
            dist.init_process_group("gloo", f"file://{store}", timedelta(seconds=SILENCE), ranks, rank)
            mesh = init_device_mesh("cpu", shape, mesh_dim_names=tuple(AXES))
        run = train(settings, mesh, "cpu", lambda loss: send("step", loss))
        send("done", vars(run))
    except Exception:
        send("failed", traceback.format_exc())
    with suppress(EOFError, OSError):
        pipe.recv_bytes()  # a rank that exited now would break the connections of the others


def joins_torchrun() -> bool:
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def join(settings: Settings, shape: Shape, alone: bool, progress: Progress) -> dict[Shape | None, list[Run]] | None:
    """Train on torchrun's processes and, if `alone`, also on the first one alone. Only that one returns results."""
    gpu = torch.cuda.is_available()
    if gpu:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
    dist.init_process_group("nccl" if gpu else "gloo", timeout=WAIT_FOR_ONE)
    ranks = dist.get_world_size()
    if shape[0] * shape[1] != ranks:
        raise DemoError(f"--mesh {shape[0]}x{shape[1]} needs {shape[0] * shape[1]} ranks, and torchrun has {ranks}")
    device = "cuda" if gpu else "cpu"
    mesh = init_device_mesh(device, shape, mesh_dim_names=tuple(AXES))
    first = dist.get_rank() == 0

    def run_on(place: Shape | None) -> Run:
        report = progress if first else _ignore_progress
        report(place, None)
        return train(settings, None if place is None else mesh, device, lambda loss: report(place, loss))

    runs: list[Any] = [None] * ranks
    dist.gather_object(run_on(shape), runs if first else None)
    results: dict[Shape | None, list[Run]] = {shape: runs}
    if alone and first:
        results = {None: [run_on(None)], **results}
    dist.barrier()
    # Only on success: a rank that fails must exit at once, so that torchrun kills the others.
    dist.destroy_process_group()
    return results if first else None


def _ignore_progress(shape: Shape | None, loss: float | None) -> None:
    """Ignore the progress."""
