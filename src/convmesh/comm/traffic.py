"""Counters of exchanges, bytes sent and waiting time, for reports and tests."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(eq=False)
class Traffic:
    """What `count_traffic` has counted on this rank.

    Attributes:
        exchanges: Halo exchanges and reshards that this rank took part in.
        bytes_sent: The bytes that it sent in them.
        seconds_waiting: How long it waited for collectives of any kind. On a GPU, waiting only orders later work behind
            the collective and takes no time on the host.
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
    """Count this rank's exchanges, the bytes that it sends in them, and the time it waits.

    All-reduces and DTensor's own collectives count in the waiting time only; `CommDebugMode` of torch counts those.

    Returns:
        A context manager that gives a `Traffic`. Read it after the block.

    Examples:
        >>> model = convmesh.distribute(nn.Conv2d(1, 1, 3, padding=1), mesh)
        >>> x = convmesh.shard(torch.randn(2, 1, 8, 8), mesh, data=0, h=2)
        >>> with torch.no_grad(), convmesh.count_traffic() as traffic:
        ...     y = model(x)
        >>> traffic.exchanges, traffic.bytes_sent  # one row of 8 float32
        (1, 32)
    """
    counter = Traffic()
    _counters.append(counter)
    try:
        yield counter
    finally:
        _counters.remove(counter)
