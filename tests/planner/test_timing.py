"""What a step's time is made of."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import convmesh
from convmesh.planner.between_ranks import links
from convmesh.planner.devices import Device, Link
from convmesh.planner.timing import time_of
from convmesh.planner.trace import Compute, Phase, Send, Trace, Use, Wait

LINK = Link(latency=1.0, bandwidth=10.0)
ALONE = Device("a device of its own", 1000, {"float32": 1.0}, 1.0, LINK, LINK, compute_share=1, memory_share=1)


def step(use: Use, peers: int = 1) -> Trace:
    """20 s of compute beside a message of 90 bytes, and 5 s that need it."""
    compute = Compute("aten::mul", "a", Phase.FORWARD, 0, 20, torch.float32)
    events = [Send("all_to_all_single", "a", Phase.FORWARD, use, 90, ("h",), peers, 1), compute, Wait(1),
              compute._replace(bytes=5)]  # fmt: skip
    return Trace((0,), {"h": peers + 1}, events=list(events))


def test_messages_go_on_beside_compute() -> None:
    time = time_of(step(Use.HALO), ALONE)
    assert (time.step, time.communication, time.waiting) == (25, 10, 0)


def test_cores_copy_messages_and_compute_for_one_rank_after_the_other() -> None:
    time = time_of(step(Use.HALO, 3), replace(ALONE, cores=2))
    assert (time.compute, time.communication, time.waiting, time.step) == (50, 10, 10, 60)


def test_sums_may_have_a_link_of_their_own() -> None:
    slow = replace(ALONE, cores=2, sums=Link(3.0, 1.0))
    assert time_of(step(Use.REDUCTION), slow).communication == 3 + 2 * 45
    assert time_of(step(Use.HALO), slow).communication == 10


def test_nobody_to_send_to() -> None:
    assert time_of(step(Use.REDUCTION, 0), ALONE).communication == 0


def test_messages_between_processes_of_this_machine() -> None:
    halos, sums = links(1)
    assert min(halos.latency, halos.bandwidth, sums.latency, sums.bandwidth) > 0
    assert halos.slower(2) == Link(2 * halos.latency, halos.bandwidth / 2)


def test_messages_that_cannot_be_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.executable", "/bin/false")
    links.cache_clear()
    with pytest.raises(convmesh.PlanError, match="give a device file"):
        links(1)
