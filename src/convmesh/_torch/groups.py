"""Process groups: their names, backends, timeouts, and the store."""

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
    """Return the process group of a functional collective's argument, which is a name or the group itself."""
    if not isinstance(group, str):  # a process group; an isinstance check for that is slow
        return group
    found: dist.ProcessGroup = torch._C._distributed_c10d._resolve_process_group(dist.distributed_c10d.GroupName(group))
    return found


_backends: WeakKeyDictionary[dist.ProcessGroup, dict[str, str]] = WeakKeyDictionary()


def _backends_of(group: dist.ProcessGroup) -> dict[str, str]:
    """The name of the backend for each type of device.

    `dist.get_backend` does not tell: its name is "undefined" if no backend was given, a list if each device has one,
    and that of all threads where these are ranks.
    """
    found = _backends.get(group)
    if found is None:
        found = _backends[group] = {kind.type: group._get_backend(kind).name() for kind in group._device_types}
    return found


def is_gloo(group: dist.ProcessGroup) -> bool:
    """Whether a group's messages between CPUs go through gloo, and not through MPI or a fake backend."""
    return _backends_of(group).get("cpu") == "gloo"


def is_fake(group: dist.ProcessGroup) -> bool:
    """Whether a group only pretends to communicate: one rank of a large mesh, for tests and planning."""
    return set(_backends_of(group).values()) == {"fake"}


def timeout_of(group: dist.ProcessGroup, device_type: str | None = None) -> timedelta:
    """Return the timeout of a group's collectives on this device type, or on its first; torch's default if none is set.

    A group may have a backend per device type; one made of threads has none.
    """
    backends = [group._get_backend(kind) for kind in group._device_types if device_type in (None, kind.type)]
    options = getattr(backends[0], "options", None) if backends else None
    said: timedelta | None = getattr(options, "_timeout", None)
    return default_pg_timeout if said is None else said


def inherit_timeout(group: dist.ProcessGroup, device_type: str) -> None:
    """Give a group without an explicit timeout the one that was passed to `init_process_group`.

    torch creates the groups of a mesh with its default of half an hour.
    """
    world = dist.group.WORLD
    assert world is not None, "a group is part of an initialised world"
    wanted, found = timeout_of(world, device_type), timeout_of(group, device_type)
    if found in (default_pg_timeout, default_pg_nccl_timeout) and found != wanted:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # from backends other than gloo and NCCL, which keep theirs
            # Newer releases of torch have a public function for this, and warn about the private one.
            getattr(dist, "set_timeout", dist.distributed_c10d._set_pg_timeout)(wanted, group)


def messages_between(ranks: tuple[int, ...], purpose: str, timeout: timedelta) -> Any:
    """Create a gloo group of these ranks without the others. Simulated ranks have groups of their own.

    torch's way (`use_local_synchronization`) names a group by the number of groups a rank has, which may differ between
    ranks: then each waits for a group that no other rank creates.
    """
    simulated = getattr(dist.group.WORLD, "messages_between", None)
    if simulated is not None:
        return simulated(ranks, purpose)
    meeting = dist.distributed_c10d.PrefixStore(f"convmesh/{purpose}/{'-'.join(map(str, ranks))}", store())
    return dist.ProcessGroupGloo(meeting, ranks.index(dist.get_rank()), len(ranks), timeout)


def inside_ddp() -> bool:
    """Whether the forward pass of a `DistributedDataParallel` is running."""
    return DistributedDataParallel._get_active_ddp_module() is not None


def store() -> Store:
    """Return the store through which all ranks can exchange messages without a collective."""
    found: Store = dist.distributed_c10d._get_default_store()
    return found
