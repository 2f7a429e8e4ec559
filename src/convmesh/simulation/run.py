"""`convmesh.simulate`: runs a function on every rank of a mesh, in this process."""

from __future__ import annotations

import contextvars
import threading
import traceback
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from .. import _torch, api, batching
from ..sharding import installation
from .group import Group
from .world import World, describe_ranks

Result = TypeVar("Result")

_one_at_a_time = threading.Lock()


def simulate(
    function: Callable[[DeviceMesh], Result], mesh: Sequence[int] | int, names: Sequence[str] | None = None
) -> list[Result]:
    """Run a function on every rank of a mesh, in this process, without torchrun.

    Ranks are threads that take turns: a rank runs until it waits for another. Each rank has its own process group,
    random state (at first the caller's) and warning filters, and computes with one thread, as under torchrun. They
    share everything else of the process, on CPUs. A process group of the process itself is restored afterwards.

    Args:
        function: It is called on each rank with the mesh. An error on any rank ends all ranks and is raised here, with
            a note that says which ranks raised it.
        mesh: The shape of the mesh.
        names: The names of its dimensions.

    Returns:
        What the function returns on each rank, in ascending rank.

    Raises:
        MismatchError: The ranks diverge: they call different collectives, or with different sizes, or a rank has
            returned while others wait for it. The message says what each rank does, and where.

    Examples:
        >>> convmesh.simulate(lambda mesh: mesh.get_coordinate(), mesh=(2, 2), names=("h", "w"))
        [(0, 0), (0, 1), (1, 0), (1, 1)]
        >>> def pooled(mesh):
        ...     x = convmesh.shard(torch.arange(64.0).view(1, 1, 8, 8), mesh, h=2)
        ...     with convmesh.enable():
        ...         return F.max_pool2d(x, 3, stride=2).to_local().shape
        >>> convmesh.simulate(pooled, mesh=(8,), names=("h",))[2:4]
        [torch.Size([1, 1, 1, 3]), torch.Size([1, 1, 0, 3])]
    """
    shape = (mesh,) if isinstance(mesh, int) else tuple(mesh)
    named = None if names is None else tuple(names)
    _check(shape, named)
    if not _one_at_a_time.acquire(blocking=False):
        raise RuntimeError("convmesh.simulate: another simulation runs in this process; ranks of one cannot begin one")
    try:
        return _Simulation(function, shape, named).run()
    finally:
        _one_at_a_time.release()


def _check(shape: tuple[int, ...], names: tuple[str, ...] | None) -> None:
    if not shape or min(shape) < 1:
        raise ValueError(f"convmesh.simulate: a mesh of {shape} has no ranks")
    if names is not None and len(names) != len(shape):
        raise ValueError(f"convmesh.simulate: {len(names)} names {names} for {len(shape)} mesh dimensions {shape}")


class _Simulation:
    def __init__(self, function: Callable[[DeviceMesh], Any], shape: tuple[int, ...], names: tuple[str, ...] | None):
        self._function, self._shape, self._names = function, shape, names
        self._world = World(shape, names)
        self._results: dict[int, Any] = {}
        self._contexts = [contextvars.copy_context() for _ in range(self._world.size)]

    def run(self) -> list[Any]:
        threads, on = torch.get_num_threads(), (installation.installed(), batching.installed())
        try:
            with _torch.threads_as_ranks(self._group):
                self._world.turns.run(lambda rank: self._contexts[rank].run(self._rank, rank))
        finally:
            torch.set_num_threads(threads)
            if (installation.installed(), batching.installed()) != on:
                api.switch_off()
        self._raise()
        return [self._results[rank] for rank in range(self._world.size)]

    def _group(self, options: Any) -> dist.ProcessGroup:
        ranks = tuple(options.global_ranks_in_group) or tuple(range(self._world.size))
        return Group(self._world, options.group_id, ranks, options.group_rank)

    def _rank(self, rank: int) -> None:
        torch.set_num_threads(1)
        with _torch.rank_of_threads(rank, self._world.size, self._world.store):
            try:
                self._results[rank] = self._function(init_device_mesh("cpu", self._shape, mesh_dim_names=self._names))
            finally:
                for work in list(self._world.turns.ranks[rank].works):
                    _torch.forget_communication(work.abandon())

    def _raise(self) -> None:
        errors = self._world.turns.errors
        if not errors:
            return
        first = next(iter(errors.values()))
        alike: dict[str, list[int]] = {}
        for rank, error in errors.items():
            if rank is not None:
                alike.setdefault(f"{type(error).__name__}: {error}", []).append(rank)
        for text, ranks in alike.items():
            who = self._world.coordinate(ranks[0]) if len(ranks) == 1 else describe_ranks(ranks)
            said = f"raised by {who} of {self._world.size} in convmesh.simulate"
            other = errors[ranks[0]]
            if other is not first and text != f"{type(first).__name__}: {first}":
                said = f"{who} raised another error:\n{''.join(traceback.format_exception(other))}"
            first.add_note(said)
        raise first
