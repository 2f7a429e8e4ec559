"""The first failure of a run, left where the other ranks find it: most of them only see what follows from it."""

from __future__ import annotations

from collections.abc import Sequence
from threading import Thread
from time import sleep

import torch.distributed as dist

from ... import _torch

_KEY = "convmesh/first failure"
_FAILED = "convmesh/failed/{}"  # by every rank that has
# The store may be gone, or its host may hang, and then a message must not keep this rank from ending.
_SECONDS = 2.0
_NAP = 0.05


_mine: str | None = None  # what this rank has said there, if nobody had before


def post(text: str, among: Sequence[int] = ()) -> tuple[str | None, tuple[int, ...]]:
    """Say that this rank has failed; returns what another rank had said before, if any had, and which ranks `among`
    some have said nothing until now: they have ended, stopped, or work on something else."""
    global _mine
    rank = dist.get_rank()
    found: list[str] = []
    silent: list[int] = []
    mine = f"rank {rank}: {text}"
    store = _torch.store()  # of this thread, which may be a rank by itself

    def write() -> None:
        try:
            store.set(_FAILED.format(rank), "1")
            found.append(store.compare_set(_KEY, "", mine).decode())
            silent.extend(other for other in among if other != rank)
            while silent:
                silent[:] = [other for other in silent if not store.check([_FAILED.format(other)])]
                sleep(_NAP)
        except RuntimeError:
            return  # nobody can be told any more, and this rank is about to end with an error of its own

    thread = Thread(target=write, daemon=True)
    thread.start()
    thread.join(_SECONDS)
    _mine = mine
    return next((text for text in found if text != mine), None), tuple(silent)


def posted() -> str | None:
    """What the first rank that failed has said, and has not taken back."""
    store = _torch.store()
    return store.get(_KEY).decode() or None if store.check([_KEY]) else None


def take_back() -> None:
    """This rank goes on after all: its failure was an error that all ranks have caught."""
    global _mine
    if _mine is not None:
        _torch.store().compare_set(_KEY, _mine, "")
        _torch.store().delete_key(_FAILED.format(dist.get_rank()))
        _mine = None
