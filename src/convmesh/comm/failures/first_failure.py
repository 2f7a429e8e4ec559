"""The first failure of a run, left where the other ranks find it: most of them only see what follows from it."""

from __future__ import annotations

from threading import Thread

import torch.distributed as dist

from ... import _torch

_KEY = "convmesh/first failure"
# The store may be gone, or its host may hang, and then a message must not keep this rank from ending.
_SECONDS = 2.0


_mine: str | None = None  # what this rank has left there


def post(text: str) -> str | None:
    """Say that this rank has failed; returns what another rank had said before, if any had."""
    global _mine
    found: list[str] = []
    mine = f"rank {dist.get_rank()}: {text}"
    store = _torch.store()  # of this thread, which may be a rank by itself

    def write() -> None:
        try:
            found.append(store.compare_set(_KEY, "", mine).decode())
        except RuntimeError:
            return  # nobody can be told any more, and this rank is about to end with an error of its own

    thread = Thread(target=write, daemon=True)
    thread.start()
    thread.join(_SECONDS)
    _mine = mine if mine in found else _mine
    return next((text for text in found if text != mine), None)


def posted() -> str | None:
    """What the first rank that failed has said, and has not taken back."""
    store = _torch.store()
    return store.get(_KEY).decode() or None if store.check([_KEY]) else None


def take_back() -> None:
    """This rank goes on after all: its failure was an error that all ranks have caught."""
    global _mine
    if _mine is not None:
        _torch.store().compare_set(_KEY, _mine, "")
        _mine = None
