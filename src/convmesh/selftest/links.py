"""Halos between neighbours: latency, bandwidth, and whether an exchange overlaps with work."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from .. import comm
from ..geometry import HaloPlan, Interval, Reads, Shards
from .timing import Stopwatch

SMALL, LARGE = 256, 2**22  # float32 elements: 1 kB for the latency, 16 MB for the bandwidth
QUICK_LARGE = 2**16
MOST_PAIRS = 16  # each needs its own process group


@dataclass(frozen=True)
class Link:
    """Between two neighbouring ranks: seconds for a tiny halo, and bytes per second for a large one."""

    ranks: tuple[int, int]
    between_hosts: bool
    latency: float
    bandwidth: float


class Halos:
    """A line of ranks where each needs one row of `elements` from each neighbour."""

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
    """The interval, extended by one index at both ends."""
    return Interval(part.start - 1, part.stop + 1)


def neighbours(hosts: Sequence[int]) -> list[tuple[int, int]]:
    """Return all pairs of neighbouring ranks; if they are too many, pairs between hosts first, then within hosts."""
    pairs = [(rank, rank + 1) for rank in range(len(hosts) - 1)]
    apart = [pair for pair in pairs if hosts[pair[0]] != hosts[pair[1]]][: MOST_PAIRS // 2]
    inside = [pair for pair in pairs if hosts[pair[0]] == hosts[pair[1]]]
    return sorted([*apart, *inside[: MOST_PAIRS - len(apart)]])


def measure_links(watch: Stopwatch, hosts: Sequence[int], large: int) -> list[Link]:
    """Measure this rank's links, each while no other link of either rank is in use. All ranks must call this."""
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
    """Seconds of an exchange, of local work that takes about as long, and of both at once."""

    exchange: float
    work: float
    both: float

    @property
    def hidden(self) -> float:
        """The fraction of the shorter one that is hidden behind the other."""
        return min(1.0, max(0.0, (self.exchange + self.work - self.both) / min(self.exchange, self.work)))


def measure_overlap(watch: Stopwatch, elements: int) -> Overlap:
    """Measure how much of an exchange is hidden behind work. All ranks must call this."""
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
