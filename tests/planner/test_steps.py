"""Steps of one's own: loss, autocast, checkpointing, accumulation, FSDP2, and what is left behind."""

from __future__ import annotations

import signal
import threading
import time
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

import convmesh
from convmesh.models import UNet
from convmesh.planner.dry_run import dry_run, silent_world
from convmesh.planner.here import step_seconds
from convmesh.planner.problem import problem
from tests.harness import Pool
from tests.planner.against_runs import Checkpointed

INPUTS = {"x": (2, 1, 32, 32), "y": convmesh.Input((2, 32, 32), torch.int64)}


def network() -> UNet:
    return UNet(2, 1, 2, (8, 16), (2,))


def planned(change: Callable[[UNet], Any] = lambda model: model, bf16: bool = False, times: int = 1) -> convmesh.Plan:
    def build(mesh: DeviceMesh) -> Any:
        model = convmesh.distribute(change(network()), mesh)
        optimizer = torch.optim.AdamW(model.parameters())

        def step(x: torch.Tensor, y: torch.Tensor) -> None:
            optimizer.zero_grad()
            for _ in range(times):
                with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
                    loss = F.cross_entropy(model(x), y)
                loss.backward()
            optimizer.step()

        return step

    return convmesh.plan(build, INPUTS, {"h": 2})


def test_autocast_and_accumulation() -> None:
    plain, half, twice = planned(), planned(bf16=True), planned(times=2)
    assert half.peak < 0.8 * plain.peak
    assert twice.largest.time.compute > 1.3 * plain.largest.time.compute, "the optimizer's step is the same"
    halos = [sum(layer.halo_bytes for layer in one.largest.layers) for one in (plain, twice)]
    assert halos[1] == 2 * halos[0]


def test_what_checkpointing_would_give_is_what_it_gives() -> None:
    def change(model: UNet) -> UNet:
        model.entry = Checkpointed(model.entry)
        return model

    row = planned().largest.checkpoints[0]
    assert row.block == "entry"
    assert planned(change).peak == pytest.approx(row.peak, rel=0.05)


def test_fsdp_over_data() -> None:
    def build(mesh: DeviceMesh) -> Any:
        model = convmesh.distribute(network(), mesh["h"])
        for part in (model.entry, model):
            fully_shard(part, mesh=mesh["data"])
        optimizer = torch.optim.AdamW(model.parameters())

        def step(x: torch.Tensor, y: torch.Tensor) -> None:
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()

        return step

    inputs = {"x": convmesh.Input((1, 1, 32, 32), over=("h",)),
              "y": convmesh.Input((1, 32, 32), torch.int64, over=("h",))}  # fmt: skip
    plan = convmesh.plan(build, inputs, {"data": 2, "h": 2})
    parameters = sum(parameter.numel() for parameter in network().parameters()) * 4
    assert plan.largest.memory.curve[0].parts["parameters"] == pytest.approx(parameters / 2, rel=0.05)  # type: ignore[index]
    # Gathered forward and, but for the root, backward; and gradients are scattered.
    assert plan.largest.bytes_along["data"] >= 2 * parameters / 2
    assert not plan.largest.gathers


def beside_a_group(mesh: DeviceMesh) -> tuple[float, int]:
    before = torch.distributed.get_world_size()
    plan = convmesh.plan(network(), {"x": (1, 1, 32, 32)}, {"h": 4, "w": 4})
    total = torch.ones(1)
    torch.distributed.all_reduce(total, group=mesh.get_group())
    assert torch.distributed.get_world_size() == before
    return float(total), plan.peak


def test_beside_a_process_group_in_use(pool: Pool) -> None:
    results = pool.run(beside_a_group, mesh=(2,), names=("h",))
    assert [total for total, _ in results] == [2, 2]
    assert results[0][1] == results[1][1]


def test_who_interrupts_a_plan_ends_it() -> None:
    def build(mesh: DeviceMesh) -> Any:
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
        while True:
            time.sleep(0.001)

    # A shell that runs tests in the background has interrupts ignored.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            convmesh.plan(build, INPUTS, {"h": 2})
    finally:
        signal.signal(signal.SIGINT, before)
    assert not any(thread.name == "convmesh plan" for thread in threading.enumerate())
    assert planned().peak


def test_a_model_from_outside_of_the_step_stays_as_it_is() -> None:
    model = nn.Sequential(nn.Conv2d(1, 2, 3, padding=1), nn.BatchNorm2d(2))
    before = {name: (tensor, tensor.clone()) for name, tensor in model.state_dict(keep_vars=True).items()}

    def build(mesh: DeviceMesh) -> Any:
        convmesh.distribute(model, mesh)
        return lambda x: model(x).mean().backward()

    asked = problem(build, {"x": (1, 1, 16, 16)}, None, "sgd", "fp32")
    with silent_world():
        trace = dry_run(asked, {"h": 2}, 0)
        assert step_seconds(asked, {"h": 2}, 0, trace, 10**9), "with numbers"
    for name, tensor in model.state_dict(keep_vars=True).items():
        same, values = before[name]
        assert tensor is same
        assert torch.equal(tensor, values)
        assert getattr(tensor, "grad", None) is None
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # as of an optimizer that trains nothing
        model(torch.ones(1, 1, 4, 4)).mean().backward()
        torch.optim.SGD(model.parameters()).step()
    assert not torch.equal(model[1].bias, before["1.bias"][1])  # type: ignore[arg-type]


def test_leaves_nothing_behind() -> None:
    model = network()
    state = torch.get_rng_state()
    convmesh.plan(model, {"x": (1, 1, 32, 32)}, {"h": 2})
    assert not torch.distributed.is_initialized()
    assert not hasattr(torch, "meta")
    assert torch.equal(state, torch.get_rng_state())
    assert all(type(parameter) is nn.Parameter and not parameter.is_meta for parameter in model.parameters())
