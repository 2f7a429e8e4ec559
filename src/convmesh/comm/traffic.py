"""Counting what the exchanges send, for reports and tests."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(eq=False)
class Traffic:
    """What this rank has sent through halo exchanges."""

    exchanges: int = 0
    bytes_sent: int = 0


_counters: list[Traffic] = []


def note(size: int) -> None:
    for counter in _counters:
        counter.exchanges += 1
        counter.bytes_sent += size


@contextmanager
def count_traffic() -> Iterator[Traffic]:
    """Count the halo exchanges that this rank takes part in, and the bytes that it sends in them."""
    counter = Traffic()
    _counters.append(counter)
    try:
        yield counter
    finally:
        _counters.remove(counter)
