"""Bytes and messages of a plan are those of a run, and its peak of memory is the run's."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh

import convmesh
from convmesh.planner.dry_run import dry_run, silent_world, traced
from convmesh.planner.memory import memory_of
from convmesh.planner.problem import Problem, problem
from convmesh.planner.trace import Send, Trace, Use
from tests.harness import Pool
from tests.planner.networks import NETWORKS


def asked(name: str, precision: str) -> Problem:
    make, shape = NETWORKS[name]
    return problem(make(), {"x": shape}, None, "adamw", precision)


def counted(mesh: DeviceMesh, name: str, precision: str = "fp32") -> tuple[int, int, int]:
    """(exchanges, bytes sent in them, peak of memory); `count_traffic` counts all steps, those that warm up too."""
    with convmesh.count_traffic() as traffic:
        trace = traced(asked(name, precision), mesh)
    return traffic.exchanges, traffic.bytes_sent, memory_of(trace).peak.total


def planned(trace: Trace) -> tuple[int, int]:
    halos = [event for event in trace.events if isinstance(event, Send) and event.use is Use.HALO]
    return len(halos), sum(event.bytes for event in halos)


def compare(name: str, mesh: dict[str, int], runs: list[tuple[int, int, int]], precision: str = "fp32") -> None:
    with silent_world():
        for rank, (exchanges, sent, peak) in enumerate(runs):
            trace = dry_run(asked(name, precision), mesh, rank)
            assert planned(trace) == (exchanges, sent)
            assert memory_of(trace).peak.total == pytest.approx(peak, rel=0.05)


@pytest.mark.parametrize("mesh", [{"h": 1}, {"h": 2}, {"h": 2, "w": 2}], ids=str)
@pytest.mark.parametrize("name", NETWORKS)
def test_processes(pool: Pool, name: str, mesh: dict[str, int]) -> None:
    compare(name, mesh, pool.run(counted, name, mesh=tuple(mesh.values()), names=tuple(mesh)))


@pytest.mark.parametrize("name", ["unet3d", "monai_unet"])
def test_eight_ranks(name: str) -> None:
    mesh = {"d": 2, "h": 2, "w": 2}
    compare(name, mesh, convmesh.simulate(lambda m: counted(m, name), tuple(mesh.values()), tuple(mesh)))


def test_bfloat16(pool: Pool) -> None:
    compare("unet2d", {"h": 2}, pool.run(counted, "unet2d", "bf16", mesh=(2,), names=("h",)), "bf16")


def test_leaves_no_process_group() -> None:
    convmesh.plan(torch.nn.Conv2d(1, 1, 3, padding=1), {"input": (1, 1, 8, 8)}, {"h": 2})
    assert not torch.distributed.is_initialized()
