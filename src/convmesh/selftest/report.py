"""What a self-test found, and its verdicts: right, wrong, or slow."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from math import prod
from statistics import median

from ..report.words import count, number
from .exactness import Exactness
from .links import Link, Overlap
from .topology import Topology
from .training import HostTime, Losses, Scaling

RIGHT, WRONG, SLOW = "right", "wrong", "slow"
# Limits beyond which something counts as slow.
LEAST_HIDDEN, LEAST_EFFICIENCY, LEAST_BANDWIDTH, MOST_HOST_TIME = 0.5, 0.5, 0.5, 8.0
MOST_LINKS = 12  # that are shown one by one
NO_LINK = {"latency": 0.0, "bandwidth": 1e12}  # for a single rank, which has no neighbour


@dataclass(frozen=True)
class Finding:
    """One line of the report."""

    verdict: str
    text: str


@dataclass(frozen=True)
class Device:
    """Figures of one rank's device: operations per second by dtype, bytes per second, and bytes of memory."""

    flops: dict[str, float]
    memory_bandwidth: float
    memory: int


@dataclass
class Report:
    """The results of all ranks. Parts that the test did not reach are empty."""

    topology: Topology
    exactness: list[Exactness] = field(default_factory=list)
    losses: Losses | None = None
    device: Device | None = None
    links: list[Link] = field(default_factory=list)
    overlap: Overlap | None = None
    host_time: HostTime | None = None
    scaling: list[Scaling] = field(default_factory=list)
    failure: str = ""  # the exception that ended the test
    seconds: float = 0.0

    @property
    def wrong(self) -> bool:
        return any(finding.verdict == WRONG for finding in self.findings())

    def findings(self) -> list[Finding]:
        parts = (self._failure(), self._exactness(), self._losses(), self._place(), self._links(), self._overlap(),
                 self._steps())  # fmt: skip
        return [finding for part in parts for finding in part]

    def families(self) -> dict[str, list[Exactness]]:
        """Return, for each operator family, the checks in which one of its rules ran."""
        names = sorted({family for one in self.exactness for family in one.families})
        return {name: [one for one in self.exactness if name in one.families] for name in names}

    def efficiency(self, row: Scaling) -> float:
        """The speed-up over one rank, divided by the number of ranks."""
        return self.scaling[0].seconds / (row.seconds * row.ranks)

    def shown_links(self) -> list[Link]:
        """All, if they are few; else those that are slow, and the slowest, the median and the fastest within a host and
        between hosts."""
        if len(self.links) <= MOST_LINKS:
            return self.links
        shown: dict[tuple[int, int], Link] = {}
        for apart in (False, True):
            links = sorted((one for one in self.links if one.between_hosts == apart), key=lambda one: one.bandwidth)
            if links:
                telling = (links[0], links[(len(links) - 1) // 2], links[-1])
                shown |= {one.ranks: one for one in (*self._slow(links)[: MOST_LINKS // 2], *telling)}
        return [shown[ranks] for ranks in sorted(shown)]

    @staticmethod
    def _slow(links: list[Link]) -> list[Link]:
        """Those of links of one kind that are slower than the others."""
        usual = median(link.bandwidth for link in links) if links else 0.0
        return [link for link in links if link.bandwidth < LEAST_BANDWIDTH * usual]

    def _failure(self) -> Iterator[Finding]:
        if self.failure:
            yield Finding(WRONG, f"the test could not go on: {self.failure}")

    def _exactness(self) -> Iterator[Finding]:
        bad = [one for one in self.exactness if not one.right]
        for one in bad:
            mesh = " x ".join(map(str, one.mesh)) + (" ranks" if prod(one.mesh) > 1 else " rank")
            said = one.failure.strip().splitlines()[-1] if one.failure else f"{one.error:.3g} times what is allowed"
            yield Finding(WRONG, f"{one.function} in {one.dtype} on {mesh} differs from one device: {said}")
        if self.exactness and not bad:
            functions = len({one.function for one in self.exactness})
            said = f"{count(functions, 'function')} of {len(self.families())} operator families"
            yield Finding(RIGHT, f"{said}, forward and backward: as exact as one device")

    def _losses(self) -> Iterator[Finding]:
        if self.losses is not None:
            apart = f"are {self.losses.apart:.1e} from" if self.losses.apart else "equal"
            said = f"the losses of a U-Net {apart} one device's"
            yield Finding(RIGHT if self.losses.right else WRONG, said)

    def _place(self) -> Iterator[Finding]:
        if self.topology.crowded:
            yield Finding(SLOW, f"{self.topology.crowded}: no time below is that of a rank with a core of its own")

    def _links(self) -> Iterator[Finding]:
        for apart in (False, True):
            links = [link for link in self.links if link.between_hosts == apart]
            for link in self._slow(links):
                pair, found = "ranks {} and {}".format(*link.ranks), f"{number(link.bandwidth / 1e9)} GB/s"
                usual = number(median(one.bandwidth for one in links) / 1e9)
                yield Finding(SLOW, f"{pair} exchange {found}, and others of their kind {usual} GB/s")

    def _overlap(self) -> Iterator[Finding]:
        if self.overlap is not None:
            said = f"{self.overlap.hidden:.0%} of an exchange is hidden behind work that takes as long"
            if self.topology.cores:
                said += "; on CPUs, ranks copy their messages themselves"
            yield Finding(RIGHT if self.overlap.hidden >= LEAST_HIDDEN else SLOW, said)

    def _steps(self) -> Iterator[Finding]:
        if self.host_time is not None:
            ratio = self.host_time.rank / self.host_time.one
            said = f"the host needs {ratio:.1f} times as long for a sharded step of a U-Net as for a plain one"
            yield Finding(RIGHT if ratio <= MOST_HOST_TIME else SLOW, said)
        if len(self.scaling) > 1:
            last = self.scaling[-1]
            said = (
                f"a step on {last.ranks} ranks is {self.scaling[0].seconds / last.seconds:.2f} times as fast as on one"
            )
            yield Finding(RIGHT if self.efficiency(last) >= LEAST_EFFICIENCY else SLOW, said)

    def device_figures(self) -> str:
        """Return the JSON that `convmesh plan --device FILE` reads. Its shares are 1: programs get what was
        measured."""
        assert self.device is not None
        node = self._usual_link(False) or self._usual_link(True) or NO_LINK
        found = {
            "name": self.topology.devices[0],
            "memory": self.device.memory,
            "flops": self.device.flops,
            "bandwidth": self.device.memory_bandwidth,
            "node": node,
            "network": self._usual_link(True) or node,
            "node_ranks": self.topology.hosts.count(0),
            "compute_share": 1.0,
            "memory_share": 1.0,
            "source": f"convmesh selftest: {self.topology.summary}",
        }
        return json.dumps(found, indent=1) + "\n"

    def _usual_link(self, between_hosts: bool) -> dict[str, float] | None:
        """Return the median latency and bandwidth of links between hosts, or within hosts; None if there are none."""
        links = [link for link in self.links if link.between_hosts == between_hosts]
        if not links:
            return None
        return {name: median(getattr(link, name) for link in links) for name in ("latency", "bandwidth")}
