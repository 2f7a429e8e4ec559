"""Threads as ranks: each has its own process groups, as if it were a process."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields
from itertools import count
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import device_mesh
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.distributed import multi_threaded_pg

from .names import Store

# torch distinguishes the meshes of different threads only if the backend has this name.
BACKEND = "threaded"
# Process-wide attributes of torch that each rank changes for itself.
OF_A_PROCESS: tuple[tuple[Any, str], ...] = (
    (DTensor._op_dispatcher, "_allow_implicit_replication"),
    (DistributedDataParallel, "_active_ddp_module"),
)

_c10d: Any = torch._C._distributed_c10d
_mine = threading.local()
_identities = count(-1, -1)  # of ranks; negative, so never the id of a thread


class _Threading:
    """Stands in for the `threading` module in `device_mesh`, where meshes are equal only if made by the same thread.

    Threads reuse the ids of dead ones, and what torch caches by mesh would be taken for another rank's.
    """

    def get_ident(self) -> int:
        found: int = getattr(_mine, "identity", threading.get_ident())
        return found

    def __getattr__(self, name: str) -> Any:
        return getattr(threading, name)


class _Worlds:
    """Stands in for torch's table of process groups: a simulated rank has its own, other threads the process's."""

    def __init__(self, process: Any) -> None:
        object.__setattr__(self, "_process", process)

    def __getattr__(self, name: str) -> Any:
        return getattr(getattr(_mine, "world", self._process), name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(getattr(_mine, "world", self._process), name, value)


def ranks_are_threads() -> bool:
    """Whether threads of this process are ranks now: one rank must not uninstall what is installed for all of them."""
    return isinstance(dist.distributed_c10d._world, _Worlds)


@contextmanager
def threads_as_ranks(make_group: Callable[[Any], dist.ProcessGroup]) -> Iterator[None]:
    """Context manager in which threads can be ranks; afterwards the process's own groups are restored.

    `make_group` is called with torch's options of a new group: `group_id`, `group_rank`, `group_size`, and
    `global_ranks_in_group`, which is empty if the group has all ranks.
    """
    module, plugins = dist.distributed_c10d, dist.Backend._plugins
    kept = {name: getattr(module, name) for name in ("_world", "_backend", "_default_pg_init_method")}
    setattr(device_mesh, "threading", _Threading())  # noqa: B010 - mypy knows it as the module alone
    plugin, hook = plugins[BACKEND.upper()], sys.excepthook
    plugins[BACKEND.upper()] = dist.Backend._BackendPlugin(lambda options, _: make_group(options), True)
    module._world = _Worlds(module._world)  # type: ignore[assignment]
    _c10d._set_thread_isolation_mode(True)
    try:
        yield
    finally:
        _c10d._set_thread_isolation_mode(False)
        sys.excepthook = hook  # a new process group replaces it
        setattr(device_mesh, "threading", threading)  # noqa: B010
        for name, value in kept.items():
            setattr(module, name, value)
        plugins[BACKEND.upper()] = plugin


def _no_groups() -> multi_threaded_pg.WorldData:
    """Return torch's initial process group tables; newer releases have more of them."""
    others: dict[str, Any] = {"default_pg": None, "group_count": 0, "comms": []}
    return multi_threaded_pg.WorldData(**{f.name: others.get(f.name, {}) for f in fields(multi_threaded_pg.WorldData)})


@contextmanager
def rank_of_threads(rank: int, size: int, store: Store) -> Iterator[None]:
    """Context manager in which this thread is a rank, with an initialised process group."""
    _mine.identity = next(_identities)
    _mine.world = _no_groups()
    try:
        dist.init_process_group(BACKEND, store=store, rank=rank, world_size=size)
        yield
        if dist.is_initialized():
            dist.destroy_process_group()
    finally:
        _c10d._unregister_all_process_groups()
        del _mine.world, _mine.identity


def forget_communication(tensors: list[torch.Tensor]) -> None:
    """Wait for results that were never awaited: torch keeps a record of them for as long as the process lives."""
    for tensor in tensors:
        torch.ops._c10d_functional.wait_tensor(tensor)
