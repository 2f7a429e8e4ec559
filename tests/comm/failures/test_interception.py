"""A rank that dies, raises or stops in the middle of a step: every other rank ends with an error, in time."""

from __future__ import annotations

import os
import re
import signal
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import convmesh
from convmesh import _torch
from tests.cases import place
from tests.launch import launch

THE_LOST_ONE = 3


def loss_of(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return F.conv2d(F.conv2d(x, weight, padding=1), weight, padding=1).square().mean()


def train(mesh: DeviceMesh, how: str, compiled: bool) -> None:
    """Steps without end, in which one rank is lost."""
    convmesh.enable()
    x = place(torch.randn(2, 3, 12, 12, dtype=torch.float64), mesh, (2, 3))
    weight = place(torch.randn(3, 3, 3, 3, dtype=torch.float64), mesh, ("R", "R")).requires_grad_()
    step = torch.compile(loss_of, backend="aot_eager", fullgraph=True) if compiled else loss_of
    step(x, weight).backward()
    lost_at = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}
    while True:
        loss = step(x, weight)
        if dist.get_rank() == THE_LOST_ONE:
            if how == "raise":
                raise ValueError("the data of this rank cannot be read")
            os.kill(os.getpid(), lost_at[how])
        loss.backward()
        assert weight.grad is not None
        weight.grad.full_tensor()


@pytest.mark.parametrize(("how", "compiled"), [("kill", False), ("kill", True), ("raise", False), ("stop", False)])
def test_every_other_rank_ends_and_names_the_group(how: str, compiled: bool) -> None:
    # A rank that stops is missed after the time-out. That of torch would be half an hour, and the launch is shorter.
    outcomes = launch(train, how, compiled, group_seconds=8 if how == "stop" else 60)
    assert outcomes[THE_LOST_ONE].exit_code == {"kill": -signal.SIGKILL, "raise": 1, "stop": None}[how]
    others = outcomes[:THE_LOST_ONE]
    for rank, outcome in enumerate(others):
        assert (outcome.error, outcome.exit_code) == ("CommunicationError", 1), outcome
        assert f"on rank {rank}, at {__file__}:" in outcome.message
        assert "remedy: " in outcome.message
        assert compiled or " in aten." in outcome.message
    # The rank that is in no group with the lost one is told of it, unless its own wait was over first.
    naming = [re.search(r"among ranks [12], 3 \(mesh dimension '[hw]'\)", outcome.message) for outcome in others]
    assert all(naming[0 if how != "stop" else 1 :])
    # Who was waiting for it says so; another rank may have ended first, and then it is that one that others miss.
    waiting = [outcome.message for outcome in others if re.search(r"among ranks [12], 3[^\n]* failed", outcome.message)]
    assert waiting
    assert all(f"no word from: rank {THE_LOST_ONE}\n" in message for message in waiting), waiting


def timeouts(mesh: DeviceMesh) -> list[timedelta]:
    chosen = init_device_mesh(
        "cpu", (2, 2), mesh_dim_names=("a", "b"), backend_override={"a": _options(5), "b": _options(7)}
    )
    for some in (mesh, chosen):
        for placements in ((0, 2), (2, 0)):
            with convmesh.enable():
                F.max_pool1d(place(torch.ones(4, 1, 8), some, placements), 3, 1, 1)
    return [_torch.timeout_of(group, "cpu") for some in (mesh, chosen) for group in some.get_all_groups()]


def _options(seconds: float) -> object:
    options = dist.ProcessGroupGloo._Options()
    options._timeout = timedelta(seconds=seconds)
    return options


def test_groups_of_a_mesh_have_the_time_out_of_the_world_unless_they_were_given_one() -> None:
    for outcome in launch(timeouts, group_seconds=33):
        assert outcome.result == [timedelta(seconds=seconds) for seconds in (33, 33, 5, 7)], outcome
