"""Plans are made once and looked up afterwards."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import lru_cache, wraps
from typing import TypeVar
from weakref import WeakKeyDictionary

import torch.distributed as dist

Plan = TypeVar("Plan")


def planned(make: Callable[..., Plan]) -> Callable[..., Plan]:
    """Cache `make` for as long as the process group lives: plans know its groups, and a new one has others."""
    caches: WeakKeyDictionary[dist.ProcessGroup, Callable[..., Plan]] = WeakKeyDictionary()

    @wraps(make)
    def look_up(*key: Hashable) -> Plan:
        world = dist.group.WORLD
        assert world is not None, "a DTensor's mesh lives in an initialised process group"
        cache = caches.get(world)
        if cache is None:
            cache = caches[world] = lru_cache(maxsize=4096)(make)
        return cache(*key)

    return look_up
