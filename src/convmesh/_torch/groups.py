"""Process groups: by their names, and how long their collectives may take."""

from __future__ import annotations

import warnings
from datetime import timedelta
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.distributed.constants import default_pg_nccl_timeout, default_pg_timeout
from torch.nn.parallel import DistributedDataParallel

from .names import Store


def group_called(group: dist.ProcessGroup | str) -> dist.ProcessGroup:
    """The process group that a functional collective was given, by its name or itself."""
    if not isinstance(group, str):  # a process group, of which Python takes long to say so
        return group
    found: dist.ProcessGroup = torch._C._distributed_c10d._resolve_process_group(dist.distributed_c10d.GroupName(group))
    return found


_by_gloo: WeakKeyDictionary[dist.ProcessGroup, bool] = WeakKeyDictionary()


def is_gloo(group: dist.ProcessGroup) -> bool:
    """Whether a group's messages between CPUs go by gloo: not by MPI, nor are they made up for a test.

    The name that `dist.get_backend` has does not tell: it is "undefined" where nobody named a backend, and a list where
    each device has one of its own.
    """
    found = _by_gloo.get(group)
    if found is None:
        cpu = torch.device("cpu")
        found = _by_gloo[group] = cpu in group._device_types and group._get_backend(cpu).name() == "gloo"
    return found


def is_fake(group: dist.ProcessGroup) -> bool:
    """Whether a group only looks as if it communicated: one rank of a large mesh, for tests and planning."""
    return dist.get_backend(group) == "fake"


def timeout_of(group: dist.ProcessGroup, device_type: str | None = None) -> timedelta:
    """How long a collective of this group on such devices, else on its first, may take; torch's default where nobody
    says. A group may have a backend for each kind of device, and one that is made of threads has none."""
    backends = [group._get_backend(kind) for kind in group._device_types if device_type in (None, kind.type)]
    options = getattr(backends[0], "options", None) if backends else None
    said: timedelta | None = getattr(options, "_timeout", None)
    return default_pg_timeout if said is None else said


def inherit_timeout(group: dist.ProcessGroup, device_type: str) -> None:
    """Give a group that nobody set a time-out for the one that was given to `init_process_group`.

    torch makes the groups of a mesh with a time-out of its own, of half an hour.
    """
    world = dist.group.WORLD
    assert world is not None, "a group is part of an initialised world"
    wanted, found = timeout_of(world, device_type), timeout_of(group, device_type)
    if found in (default_pg_timeout, default_pg_nccl_timeout) and found != wanted:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # of backends other than gloo and NCCL, which keep their own
            # Newer releases of torch have a public function for it, and warn of the private one.
            getattr(dist, "set_timeout", dist.distributed_c10d._set_pg_timeout)(wanted, group)


def messages_between(ranks: tuple[int, ...], purpose: str, timeout: timedelta) -> Any:
    """A gloo group of these ranks, which make it together; no other rank has to come. Simulated ranks have their own.

    torch's own way (`use_local_synchronization`) names a group by how many a rank has, and ranks may have different
    numbers of them: then each waits for a group that nobody else makes.
    """
    simulated = getattr(dist.group.WORLD, "messages_between", None)
    if simulated is not None:
        return simulated(ranks, purpose)
    meeting = dist.distributed_c10d.PrefixStore(f"convmesh/{purpose}/{'-'.join(map(str, ranks))}", store())
    return dist.ProcessGroupGloo(meeting, ranks.index(dist.get_rank()), len(ranks), timeout)


def inside_ddp() -> bool:
    """Whether this is called by the forward pass of a `DistributedDataParallel`."""
    return DistributedDataParallel._get_active_ddp_module() is not None


def store() -> Store:
    """Where all ranks can leave each other messages without a collective."""
    found: Store = dist.distributed_c10d._get_default_store()
    return found
