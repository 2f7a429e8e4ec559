"""The first failure of a run, posted in the store for the other ranks, most of which only see its consequences."""

from __future__ import annotations

from collections.abc import Sequence
from threading import Thread
from time import sleep, time

import torch.distributed as dist

from ... import _torch

_KEY = "convmesh/first failure"
_FAILED = "convmesh/failed/{}"  # written by every rank that has failed
# The store may be gone, or its host may hang; then posting must not keep this rank from ending.
_SECONDS = 2.0
_NAP = 0.05
_BEGAN = time()  # start of this process, and of the world that it is part of


_mine: str | None = None  # what this rank has posted under _KEY, if it was the first


def post(text: str, among: Sequence[int] = ()) -> tuple[str | None, tuple[int, ...]]:
    """Post that this rank has failed.

    Returns what another rank had posted before, or None, and the ranks of `among` that have posted nothing until now:
    they have ended, have stopped, or are busy with something else.
    """
    global _mine
    rank = dist.get_rank()
    found: list[str] = []
    silent: list[int] = []
    mine = f"{time()} rank {rank}: {text}"
    store = _torch.store()  # of this thread, which may be a simulated rank

    def write() -> None:
        try:
            store.set(_FAILED.format(rank), mine)
            left = "" if _read(store, _KEY) else _raw(store, _KEY)
            found.append(_text(store.compare_set(_KEY, left, mine).decode()))
            silent.extend(other for other in among if other != rank)
            while silent:
                silent[:] = [other for other in silent if not _read(store, _FAILED.format(other))]
                sleep(_NAP)
        except RuntimeError:
            return  # the store cannot be reached any more, and this rank is about to end with an error of its own

    thread = Thread(target=write, daemon=True)
    thread.start()
    thread.join(_SECONDS)
    _mine = mine
    return next((text for text in found if text != _text(mine)), None), tuple(silent)


def posted() -> str | None:
    """Return what the first rank that failed has posted and not taken back, or None."""
    return _read(_torch.store(), _KEY) or None


def _read(store: _torch.Store, key: str) -> str:
    """Return what was posted under `key` since this process began.

    torchrun's store outlives the processes that it restarts, and still has what they posted before.
    """
    said = _raw(store, key)
    return _text(said) if said and float(said.partition(" ")[0]) >= _BEGAN else ""


def _raw(store: _torch.Store, key: str) -> str:
    return str(store.get(key).decode()) if store.check([key]) else ""


def _text(said: str) -> str:
    return said.partition(" ")[2]


def take_back() -> None:
    """Remove what this rank has posted: it continues, as the failure was an error that all ranks have caught."""
    global _mine
    if _mine is not None:
        _torch.store().compare_set(_KEY, _mine, "")
        _torch.store().delete_key(_FAILED.format(dist.get_rank()))
        _mine = None
