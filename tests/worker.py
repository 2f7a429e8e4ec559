"""What runs in each process of the test pool: a rank that is sent functions and replies with their results."""

import faulthandler
import io
import multiprocessing as mp
import os
import pickle
import signal
import socket
import threading
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

import convmesh

WORLD_SIZE = 4

MeshKey = tuple[tuple[int, ...], tuple[int, ...], tuple[str, ...] | None]


@dataclass(frozen=True)
class Reply:
    result: Any = None
    failure: str | None = None  # the traceback's text
    raised_at: tuple[tuple[str, int | None], ...] = ()  # the traceback's places, without rank-dependent messages


def pack(value: Any) -> bytes:
    # The pickler of multiprocessing sends tensors as shared-memory handles that die with their process; torch.save
    # writes the numbers themselves.
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def unpack(data: bytes) -> Any:
    return torch.load(io.BytesIO(data), weights_only=False)


def loopback() -> str:
    """The network interface to oneself."""
    return next(name for _, name in socket.if_nameindex() if name.startswith("lo"))


def _end_with_parent() -> None:
    # A rank that sits in a collective does not see that pytest was killed, so a thread watches for it.
    parent = mp.parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os._exit(1)


def _attempt(task: Callable[..., Any], *args: Any) -> bytes:
    try:
        return pack(Reply(result=task(*args)))
    except BaseException as error:  # sys.exit and pytest.fail are failures of the task, not the end of the worker
        places = tuple((frame.filename, frame.lineno) for frame in traceback.extract_tb(error.__traceback__))
        return pack(Reply(failure="".join(traceback.format_exception(error)), raised_at=places))


def serve(rank: int, world: int, pipe: Connection, store_file: Path, stack_file: Path, stays_enabled: bool) -> None:
    """The life of a worker: reply once when ready, then once to every task, until the pipe is closed.

    After each task convmesh is disabled, unless it `stays_enabled`.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole process group; the parent decides
    threading.Thread(target=_end_with_parent, daemon=True).start()
    torch.set_num_threads(1)
    convmesh.disable()  # a test that wants the rules says so
    os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback())  # a host name that does not resolve must not matter
    meshes: dict[MeshKey, DeviceMesh] = {}

    def run_task(key: MeshKey, packed_call: bytes) -> Any:
        shape, ranks, names = key
        if key not in meshes:
            meshes[key] = DeviceMesh("cpu", torch.tensor(ranks).reshape(shape), mesh_dim_names=names)
        if rank not in ranks:
            return None
        torch.manual_seed(0)  # a test must not depend on which tests ran before it
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            fn, args = unpack(packed_call)
            try:
                return fn(meshes[key], *args)
            finally:
                if not stays_enabled:
                    convmesh.disable()  # which `distribute` leaves on

    with stack_file.open("w") as stack_output:
        faulthandler.register(signal.SIGUSR1, file=stack_output, all_threads=False)
        pipe.send_bytes(_attempt(dist.init_process_group, "gloo", f"file://{store_file}", None, world, rank))
        while True:
            try:
                key, packed_call = pickle.loads(pipe.recv_bytes())
            except EOFError:
                os._exit(0)  # ranks end at different times: taking gloo down in order would make them wait
            pipe.send_bytes(_attempt(run_task, key, packed_call))
