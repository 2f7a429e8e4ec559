"""Counting what the exchanges send and how long they keep waiting, for reports and tests."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(eq=False)
class Traffic:
    """What this rank has sent through halo exchanges, and for how long it has waited for communications of any kind.

    On a GPU a wait only puts the rest of the work behind the communication, and takes no time here.
    """

    exchanges: int = 0
    bytes_sent: int = 0
    seconds_waiting: float = 0.0


_counters: list[Traffic] = []


def note(size: int) -> None:
    for counter in _counters:
        counter.exchanges += 1
        counter.bytes_sent += size


def note_wait(seconds: float) -> None:
    for counter in _counters:
        counter.seconds_waiting += seconds


@contextmanager
def count_traffic() -> Iterator[Traffic]:
    """Count the halo exchanges that this rank takes part in, the bytes that it sends in them, and the time it waits."""
    counter = Traffic()
    _counters.append(counter)
    try:
        yield counter
    finally:
        _counters.remove(counter)
