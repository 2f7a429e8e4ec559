"""Steps of many kinds: what a plan says that ranks send, and its peak, are those of a run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from math import prod
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint_sequential

import convmesh
from convmesh.planner.dry_run import dry_run, silent_world, traced
from convmesh.planner.memory import memory_of
from convmesh.planner.problem import problem
from convmesh.planner.trace import Send, Trace, Use

Step = Callable[..., object]
IMAGE = {"x": (2, 3, 64, 64)}
CLASSES = IMAGE | {"y": convmesh.Input((2, 64, 64), torch.int64)}


def network(last: int = 3) -> nn.Sequential:
    layers = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.Conv2d(8, last, 3, padding=1)
    return nn.Sequential(*layers)


def two_optimizers(mesh: DeviceMesh) -> Step:
    generator, critic = convmesh.distribute(network(), mesh), convmesh.distribute(network(1), mesh)
    first = torch.optim.Adam(generator.parameters())
    second = torch.optim.RMSprop(critic.parameters())

    def step(x: torch.Tensor) -> None:
        made = generator(x)
        second.zero_grad()
        (F.softplus(-critic(x)).mean() + F.softplus(critic(made.detach())).mean()).backward()
        second.step()
        first.zero_grad()
        F.softplus(-critic(made)).mean().backward()
        first.step()

    return step


def accumulated_and_clipped(mesh: DeviceMesh) -> Step:
    model = convmesh.distribute(network(), mesh)
    optimizer = torch.optim.AdamW(model.parameters())

    def step(x: torch.Tensor, y: torch.Tensor) -> None:
        optimizer.zero_grad()
        for _ in range(2):
            F.cross_entropy(model(x), y).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    return step


def scaled(mesh: DeviceMesh) -> Step:
    model = convmesh.distribute(network(), mesh)
    optimizer, scaler = torch.optim.AdamW(model.parameters()), torch.amp.GradScaler("cpu")

    def step(x: torch.Tensor, y: torch.Tensor) -> None:
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16):
            loss = F.cross_entropy(model(x), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()

    return step


def only_evaluated(mesh: DeviceMesh) -> Step:
    model = convmesh.distribute(network().eval(), mesh)
    return torch.inference_mode()(lambda x: model(x).argmax(1))  # type: ignore[no-any-return]


def gradient_of_a_gradient(mesh: DeviceMesh) -> Step:
    model = convmesh.distribute(nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.SiLU()), mesh)

    def step(x: torch.Tensor) -> None:
        model.zero_grad()
        x = x.detach().requires_grad_()
        (slope,) = torch.autograd.grad(model(x).square().mean(), x, create_graph=True)
        slope.square().mean().backward()

    return step


def frozen_tied_and_checkpointed(mesh: DeviceMesh) -> Step:
    model = network(8)
    model.append(nn.Conv2d(8, 8, 3, padding=1))
    model.append(nn.Conv2d(8, 8, 3, padding=1))
    model[5].weight = model[4].weight  # type: ignore[assignment]
    model[0].requires_grad_(False)
    model = convmesh.distribute(model, mesh)
    optimizer = torch.optim.SGD([one for one in model.parameters() if one.requires_grad], momentum=0.9)

    def step(x: torch.Tensor) -> None:
        optimizer.zero_grad()
        checkpoint_sequential(model, 2, x, use_reentrant=False).mean().backward()
        optimizer.step()

    return step


class Recurrent(nn.Module):
    """Sharded over what it goes along, it has to be resharded."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.lstm = nn.Conv1d(3, 8, 3, padding=1), nn.LSTM(8, 16, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.lstm(self.conv(x).transpose(1, 2))[0]
        return made


def recurrent(mesh: DeviceMesh) -> Step:
    model = convmesh.distribute(Recurrent(), mesh)
    return lambda x: model(x).mean().backward()


class Conditioned(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.shift, self.last = (
            nn.Conv2d(3, 8, 3, padding=1),
            nn.Linear(5, 8),
            nn.Conv2d(8, 3, 3, padding=1),
        )
        self.register_buffer("scale", torch.ones(8, 1, 1))

    def forward(self, x: torch.Tensor, t: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
        y = F.silu(self.first(x) * self.scale + self.shift(t)[:, :, None, None])
        made: torch.Tensor = self.last(y).masked_fill(~kept, 0.0)
        return made


def several_inputs(mesh: DeviceMesh) -> Step:
    model = convmesh.distribute(Conditioned(), mesh)
    return lambda **inputs: model(**inputs).mean().backward()


def sharded_data(mesh: DeviceMesh) -> Step:
    model = convmesh.distribute(network(), mesh["h"])
    for part in (model[0], model):
        fully_shard(part, mesh=mesh["data"])
    optimizer = torch.optim.AdamW(model.parameters())

    def step(x: torch.Tensor) -> None:
        optimizer.zero_grad()
        model(x).mean().backward()
        optimizer.step()

    return step


CONDITIONS = IMAGE | {"t": (2, 5), "kept": convmesh.Input((2, 1, 64, 64), torch.bool)}
CASES: list[tuple[Callable[[DeviceMesh], Step], dict[str, Any], dict[str, int]]] = [
    (two_optimizers, IMAGE, {"h": 2}),
    (accumulated_and_clipped, CLASSES, {"data": 2, "h": 2}),
    (scaled, CLASSES, {"h": 2}),
    (only_evaluated, {"x": (1, 3, 256, 256)}, {"h": 2}),
    (gradient_of_a_gradient, IMAGE, {"w": 2}),
    (frozen_tied_and_checkpointed, IMAGE, {"h": 2}),
    (recurrent, {"x": (4, 3, 32)}, {"w": 2}),
    (several_inputs, CONDITIONS, {"h": 2}),
    (sharded_data, {"x": convmesh.Input((1, 3, 64, 64), over=("h",))}, {"data": 2, "h": 2}),
]


def sent(trace: Trace) -> Counter[tuple[str, int]]:
    """By layer and bytes. Gloo gathers what other backends reshard. Simulated ranks compare the small numbers that they
    are given, which have values in a run only; and their FSDP2 gathers where nobody sees it."""
    return Counter(
        (event.layer, event.bytes) for event in trace.step
        if isinstance(event, Send) and event.peers and not event.operator.startswith("_")
        and (event.layer != "loss" or event.use is Use.HALO)
    )  # fmt: skip


@pytest.mark.parametrize(("build", "inputs", "mesh"), CASES, ids=lambda value: getattr(value, "__name__", ""))
def test_are_planned_as_they_run(
    build: Callable[[DeviceMesh], Step], inputs: dict[str, Any], mesh: dict[str, int]
) -> None:
    asked = problem(build, inputs, None, "adamw", "fp32")

    def run(on: DeviceMesh) -> tuple[tuple[int, int], Trace]:
        with convmesh.count_traffic() as traffic:
            trace = traced(asked, on)
        return (traffic.exchanges, traffic.bytes_sent), trace

    runs = convmesh.simulate(run, tuple(mesh.values()), tuple(mesh))
    for rank in {0, prod(mesh.values()) - 1}:
        counted, ran = runs[rank]
        with silent_world():
            plan = dry_run(asked, mesh, rank)
        halos = [event.bytes for event in plan.events if isinstance(event, Send) and event.use is Use.HALO]
        assert (len(halos), sum(halos)) == counted
        assert sent(plan) == sent(ran)
        # What gloo gathers it holds for a moment; other backends only hold what they reshard.
        rel = 0.1 if any(isinstance(event, Send) and event.use is Use.RESHARD for event in plan.events) else 0.05
        assert memory_of(plan).peak.total == pytest.approx(memory_of(ran).peak.total, rel=rel)
