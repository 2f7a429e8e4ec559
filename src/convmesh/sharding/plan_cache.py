"""Caches of plans."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import lru_cache, wraps
from threading import local
from typing import Any, TypeVar
from weakref import ref

import torch.distributed as dist

from .. import _torch

Plan = TypeVar("Plan")

LARGEST = 4096


class PerProcessGroup(local):
    """A value that is valid while the process group exists: plans refer to its groups, and a new one has others.

    It is thread-local, because threads may be simulated ranks, each with a process group of its own.
    """

    def __init__(self, make: Callable[[], Any]):
        self._make = make
        self._world: Callable[[], dist.ProcessGroup | None] = lambda: None
        self._value: Any = None

    def get(self) -> Any:
        world = dist.group.WORLD
        if self._world() is not world or world is None:
            assert world is not None, "a DTensor's mesh lives in an initialised process group"
            self._world, self._value = ref(world), self._make()
        return self._value


def planned(make: Callable[..., Plan]) -> Callable[..., Plan]:
    """Cache the results of `make` while the process group exists."""
    cache = PerProcessGroup(lambda: lru_cache(maxsize=LARGEST)(make))

    @wraps(make)
    def look_up(*key: Hashable) -> Plan:
        try:
            plan: Plan = cache.get()(*key)
            return plan
        except TypeError:
            if not _torch.has_symbols(key):
                raise
        return make(*key)  # for this graph only: it has guards for what the plan asks of symbols

    return look_up


class PlanTable:
    """A cache of plans with explicit keys, for plans whose arguments contain more than needed to distinguish them.

    Code that reads `plans` directly must check that a plan's mesh is the current one; an equal mesh may be of an older
    world.
    """

    def __init__(self) -> None:
        self.plans: dict[Hashable, Any] = {}
        self._current = PerProcessGroup(self._forget)

    def _forget(self) -> bool:
        self.plans.clear()
        return True

    def look_up(self, key: Hashable, make: Callable[[], Plan]) -> Plan:
        self._current.get()
        try:
            found: Plan | None = self.plans.get(key)
        except TypeError:
            if not _torch.has_symbols(key):
                raise
            return make()
        if found is None:
            if len(self.plans) >= LARGEST:
                self.plans.clear()
            found = self.plans[key] = make()
        return found
