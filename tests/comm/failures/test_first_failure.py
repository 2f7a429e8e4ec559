"""What ranks leave for each other when they fail, and what of it counts."""

from __future__ import annotations

import time

import pytest
import torch.distributed as dist

from convmesh import _torch
from convmesh.comm.failures import first_failure


class Rank:
    """Of ranks that have a store in common."""

    def __init__(self, patch: pytest.MonkeyPatch):
        store, self._patch = dist.HashStore(), patch
        patch.setattr(_torch, "store", lambda: store)
        patch.setattr(first_failure, "_SECONDS", 0.2)

    def post(self, rank: int, text: str) -> tuple[str | None, tuple[int, ...]]:
        self._patch.setattr(dist, "get_rank", lambda: rank)
        return first_failure.post(text, (0, 1, 2))


def test_the_first_one_is_told_to_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = Rank(monkeypatch)
    assert ranks.post(1, "one") == (None, (0, 2))
    assert first_failure.posted() == "rank 1: one"
    assert ranks.post(0, "two") == ("rank 1: one", (2,))


def test_one_that_is_caught_is_taken_back(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = Rank(monkeypatch)
    ranks.post(1, "one")
    first_failure.take_back()
    assert first_failure.posted() is None
    assert ranks.post(2, "two") == (None, (0, 1))


def test_what_was_said_before_a_restart_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """torchrun's store outlives the processes that it restarts."""
    ranks = Rank(monkeypatch)
    ranks.post(1, "before")
    ranks.post(0, "before, too")
    monkeypatch.setattr(first_failure, "_BEGAN", time.time())
    assert first_failure.posted() is None
    assert ranks.post(2, "after") == (None, (0, 1))
    assert first_failure.posted() == "rank 2: after"
    assert ranks.post(0, "after it") == ("rank 2: after", (1,))
