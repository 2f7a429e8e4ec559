"""The first failure of a run, left where the other ranks find it: most of them only see what follows from it."""

from __future__ import annotations

from collections.abc import Sequence
from threading import Thread
from time import sleep, time

import torch.distributed as dist

from ... import _torch

_KEY = "convmesh/first failure"
_FAILED = "convmesh/failed/{}"  # by every rank that has
# The store may be gone, or its host may hang, and then a message must not keep this rank from ending.
_SECONDS = 2.0
_NAP = 0.05
_BEGAN = time()  # of this process, and of the world that it is part of


_mine: str | None = None  # what this rank has said there, if nobody had before


def post(text: str, among: Sequence[int] = ()) -> tuple[str | None, tuple[int, ...]]:
    """Say that this rank has failed; returns what another rank had said before, if any had, and which ranks `among`
    some have said nothing until now: they have ended, stopped, or work on something else."""
    global _mine
    rank = dist.get_rank()
    found: list[str] = []
    silent: list[int] = []
    mine = f"{time()} rank {rank}: {text}"
    store = _torch.store()  # of this thread, which may be a rank by itself

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
            return  # nobody can be told any more, and this rank is about to end with an error of its own

    thread = Thread(target=write, daemon=True)
    thread.start()
    thread.join(_SECONDS)
    _mine = mine
    return next((text for text in found if text != _text(mine)), None), tuple(silent)


def posted() -> str | None:
    """What the first rank that failed has said, and has not taken back."""
    return _read(_torch.store(), _KEY) or None


def _read(store: _torch.Store, key: str) -> str:
    """What is said there, if it was said since this process began: torchrun's store outlives the processes that it
    ends, and has what they said before those of today."""
    said = _raw(store, key)
    return _text(said) if said and float(said.partition(" ")[0]) >= _BEGAN else ""


def _raw(store: _torch.Store, key: str) -> str:
    return str(store.get(key).decode()) if store.check([key]) else ""


def _text(said: str) -> str:
    return said.partition(" ")[2]


def take_back() -> None:
    """This rank goes on after all: its failure was an error that all ranks have caught."""
    global _mine
    if _mine is not None:
        _torch.store().compare_set(_KEY, _mine, "")
        _torch.store().delete_key(_FAILED.format(dist.get_rank()))
        _mine = None
