"""What a self-test says of its numbers."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from rich.console import Console

from convmesh.planner.devices import Link as PlanLink
from convmesh.planner.devices import device
from convmesh.selftest.exactness import Exactness
from convmesh.selftest.links import Link, Overlap, neighbours
from convmesh.selftest.page import page
from convmesh.selftest.report import Device, Report
from convmesh.selftest.terminal import show
from convmesh.selftest.topology import Topology
from convmesh.selftest.training import HostTime, Losses, Scaling, numbers_of_ranks


@pytest.fixture
def report() -> Report:
    """Of four ranks on two hosts."""
    topology = Topology({"torch": "2.13.0"}, "nccl", (0, 0, 1, 1), ("GPU",) * 4, {"NCCL_DEBUG": "WARN"})
    return Report(
        topology,
        exactness=[Exactness("conv", "float32", (4,), frozenset({"convolution"}), 0.3)],
        losses=Losses((1.0, 0.5), (1.0, 0.5)),
        device=Device({"float32": 1e13}, 1e12, 10**10),
        links=[Link((0, 1), False, 1e-5, 3e11), Link((1, 2), True, 3e-5, 5e10), Link((2, 3), False, 1e-5, 3e11)],
        overlap=Overlap(2.0, 2.0, 2.1),
        host_time=HostTime(1.0, 2.0),
        scaling=[Scaling(1, 64, 4.0, 0.0), Scaling(4, 64, 1.1, 0.1)],
    )


def verdicts(report: Report) -> dict[str, str]:
    return {finding.text: finding.verdict for finding in report.findings()}


def test_all_is_right(report: Report) -> None:
    assert set(verdicts(report).values()) == {"right"}
    assert not report.wrong


def test_what_is_wrong(report: Report) -> None:
    report.exactness += [
        Exactness("pool", "float64", (2, 2), frozenset({"pooling"}), 7.0),
        Exactness("pad", "float64", (4,), failure="Traceback\nValueError: odd"),
    ]
    report.losses = Losses((1.0, 0.5), (1.0, 0.51))
    report.failure = "rank 2: gone"
    wrong = [text for text, verdict in verdicts(report).items() if verdict == "wrong"]
    assert report.wrong
    for part in ("pool in float64 on 2 x 2 ranks", "ValueError: odd", "2.0e-02 from one device's", "rank 2: gone"):
        assert any(part in text for text in wrong), part
    shown = page(report, show(report, Console(quiet=True)))
    assert "Something is wrong" in shown
    assert "ValueError: odd" in shown


def test_what_is_slow(report: Report) -> None:
    report.links.append(Link((4, 5), False, 1e-5, 1e10))
    report.overlap, report.host_time = Overlap(2.0, 2.0, 3.9), HostTime(1.0, 9.0)
    report.scaling[1] = Scaling(4, 64, 3.0, 0.1)
    slow = [text for text, verdict in verdicts(report).items() if verdict == "slow"]
    assert len(slow) == 4
    assert any("ranks 4 and 5 exchange 10.0 GB/s" in text for text in slow)
    assert not report.wrong, "who is slow is not wrong"


def test_of_many_links_those_that_tell_something_are_shown(report: Report) -> None:
    assert report.shown_links() == report.links
    report.links = [Link((one, one + 1), one % 8 == 7, 1e-5, 1e9 * (100 + one)) for one in range(63)]
    report.links[5] = Link((5, 6), False, 1e-4, 1e9)
    shown = [link.ranks[0] for link in report.shown_links()]
    assert shown == [5, 7, 30, 31, 55, 62]
    assert "6 of 63" in page(report, show(report, Console(quiet=True)))


def test_a_laptop_is_told_why_it_is_slow(report: Report) -> None:
    report.topology = replace(report.topology, hosts=(0, 0, 0, 0), cores=(2, 2, 2, 2))
    report.overlap = Overlap(2.0, 2.0, 3.9)
    slow = [text for text, verdict in verdicts(report).items() if verdict == "slow"]
    assert any("4 ranks of a host share 2 cores" in text for text in slow)
    assert any("ranks copy their messages themselves" in text for text in slow)


def test_figures_for_plans(report: Report, tmp_path: Path) -> None:
    figures = json.loads(report.device_figures())
    assert figures["node"] == {"latency": 1e-5, "bandwidth": 3e11}
    assert figures["network"] == {"latency": 3e-5, "bandwidth": 5e10}
    assert figures["node_ranks"] == 2
    file = tmp_path / "device.json"
    file.write_text(report.device_figures())
    read = device(str(file))
    assert (read.node, read.network) == (PlanLink(1e-5, 3e11), PlanLink(3e-5, 5e10))
    assert read.rate(torch.float32) == 1e13


def test_neighbours_between_hosts_are_among_the_measured() -> None:
    assert neighbours((0, 0, 1)) == [(0, 1), (1, 2)]
    many = neighbours([rank // 8 for rank in range(64)])
    assert len(many) == 16
    assert sum(a // 8 != b // 8 for a, b in many) == 7


def test_numbers_of_ranks() -> None:
    assert numbers_of_ranks(1) == [1]
    assert numbers_of_ranks(6) == [1, 2, 4, 6]
    assert numbers_of_ranks(8) == [1, 2, 4, 8]
