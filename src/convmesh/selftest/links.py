"""Halos between neighbours: how long one takes, how many bytes a second, and whether work goes on meanwhile."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from .. import comm
from ..geometry import HaloPlan, Interval, Reads, Shards
from .timing import Stopwatch

SMALL, LARGE = 256, 2**22  # elements of float32: 1 kB tells the latency, 16 MB the bandwidth
QUICK_LARGE = 2**16
MOST_PAIRS = 16  # each needs a process group of its own


@dataclass(frozen=True)
class Link:
    """Between two ranks that are neighbours: seconds of a halo of nearly nothing, and bytes a second of a large one."""

    ranks: tuple[int, int]
    between_hosts: bool
    latency: float
    bandwidth: float


class Halos:
    """Each of a line of ranks needs one row of its neighbours', of so many elements."""

    def __init__(self, group: dist.ProcessGroup, elements: int, device: torch.device):
        ranks, here = group.size(), group.rank()
        owned = Shards(2 * ranks, (ranks,))
        needed = Reads(owned, lambda shard: (_wider(shard),), _wider)
        line = comm.RankLine((group,), (ranks,), (here,))
        self.tensor = torch.randn(2, elements, device=device)
        self._own = (owned[here],)
        self._schedule = comm.halo(line, comm.Halo(0, HaloPlan(owned, needed), (Interval(0, 2 * ranks),)))

    def start(self) -> comm.Pending:
        return comm.start(self._schedule, [comm.Held.own(self.tensor, (0,), self._own)])

    def exchange(self) -> None:
        self.start().finish()


def _wider(part: Interval) -> Interval:
    return Interval(part.start - 1, part.stop + 1)


def neighbours(hosts: Sequence[int]) -> list[tuple[int, int]]:
    """Pairs of ranks in a row: all of them if they are few, else those between hosts first, then some of each kind."""
    pairs = [(rank, rank + 1) for rank in range(len(hosts) - 1)]
    apart = [pair for pair in pairs if hosts[pair[0]] != hosts[pair[1]]][: MOST_PAIRS // 2]
    inside = [pair for pair in pairs if hosts[pair[0]] == hosts[pair[1]]]
    return sorted([*apart, *inside[: MOST_PAIRS - len(apart)]])


def measure_links(watch: Stopwatch, hosts: Sequence[int], large: int) -> list[Link]:
    """This rank's links, each measured while no other link of either rank is in use. All ranks call this."""
    pairs = neighbours(hosts)
    groups = {pair: dist.new_group(list(pair)) for pair in pairs}
    found = []
    for turn in (0, 1):
        dist.barrier()
        for pair in pairs:
            if pair[0] % 2 == turn and dist.get_rank() in pair:
                found.append(_measured(watch, pair, hosts[pair[0]] != hosts[pair[1]], groups[pair], large))
    dist.barrier()
    return found


def _measured(watch: Stopwatch, ranks: tuple[int, int], apart: bool, group: dist.ProcessGroup, large: int) -> Link:
    little, much = Halos(group, SMALL, watch.device), Halos(group, large, watch.device)
    latency = watch.seconds(little.exchange, repeat=20)
    seconds = watch.seconds(much.exchange, repeat=2)
    return Link(ranks, apart, latency, much.tensor[0].nbytes / max(seconds - latency, 1e-9))


@dataclass(frozen=True)
class Overlap:
    """Seconds of an exchange, of work on this rank that takes about as long, and of both at once."""

    exchange: float
    work: float
    both: float

    @property
    def hidden(self) -> float:
        """The part of the shorter one that the other hides."""
        return min(1.0, max(0.0, (self.exchange + self.work - self.both) / min(self.exchange, self.work)))


def measure_overlap(watch: Stopwatch, elements: int) -> Overlap:
    """All ranks call this."""
    world = dist.group.WORLD
    assert world is not None
    halos, matrix = Halos(world, elements, watch.device), torch.randn(256, 256, device=watch.device)
    exchange = watch.seconds(halos.exchange, together=dist.barrier)
    one = watch.seconds(lambda: matrix @ matrix, repeat=20)
    count = torch.tensor(max(1, round(exchange / one)), device=watch.device)
    dist.all_reduce(count, dist.ReduceOp.MAX)
    products = min(int(count), 20_000)

    def work() -> None:
        for _ in range(products):
            torch.mm(matrix, matrix)

    def both() -> None:
        pending = halos.start()
        work()
        pending.finish()

    return Overlap(exchange, watch.seconds(work, together=dist.barrier), watch.seconds(both, together=dist.barrier))
