"""`convmesh.simulate`: a function on every rank of a mesh, in this process."""

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
from ..sharding import registry
from .group import Group
from .world import World, ranks_named

Result = TypeVar("Result")

_one_at_a_time = threading.Lock()


def simulate(
    function: Callable[[DeviceMesh], Result], mesh: Sequence[int] | int, names: Sequence[str] | None = None
) -> list[Result]:
    """Call `function(mesh)` on every rank of a mesh of CPUs, all in this process, and return what each rank returns,
    in the order of the ranks: `mesh` is its shape, `names` are those of its dimensions.

    The numbers are real, and so is what is sent; only the processes are not there. Ranks are threads that take turns:
    a rank runs until it waits for another. Each has its own process group, random state (at first the caller's) and
    warning filters, and computes with one thread, as under torchrun. Everything else of the process they share.

    An error of a rank ends all of them and is raised here, with a note that says which ranks raised it. A
    `MismatchError` says what each rank does when they do not do the same: other collectives, other sizes, or a rank
    that has returned while others wait for it.
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
        threads, on = torch.get_num_threads(), (registry.installed(), batching.installed())
        try:
            with _torch.threads_as_ranks(self._group):
                self._world.turns.run(lambda rank: self._contexts[rank].run(self._rank, rank))
        finally:
            torch.set_num_threads(threads)
            if (registry.installed(), batching.installed()) != on:
                api.disable()
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
            who = self._world.coordinate(ranks[0]) if len(ranks) == 1 else ranks_named(ranks)
            said = f"raised by {who} of {self._world.size} in convmesh.simulate"
            other = errors[ranks[0]]
            if other is not first and text != f"{type(first).__name__}: {first}":
                said = f"{who} raised another error:\n{''.join(traceback.format_exception(other))}"
            first.add_note(said)
        raise first
