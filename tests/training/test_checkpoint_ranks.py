"""Ranks that save and load together: one that fails or dies, in the background, or as two jobs."""

from __future__ import annotations

import errno
import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import convmesh
from convmesh.training.checkpoint import files, folder, shards
from convmesh.training.checkpoint.manifest import Manifest
from tests.launch import launch
from tests.training.test_checkpoint import Training, train, whole

GROUP_SECONDS = 2
SAVES = {"write": (files, "write"), "manifest": (Manifest, "text"), "rename": (Path, "rename"),
         "publish": (folder, "publish")}  # fmt: skip


def die_while_saving(mesh: DeviceMesh, place: Path, lost: int, where: str, wait: bool) -> None:
    """The lost rank is killed in the second save, when it comes to `where`."""
    shards._SHARED_BYTES = 1  # so that both ranks have something to write
    training = Training(mesh)
    training.step(0)
    training.save(place, 1)
    training.step(1)
    if dist.get_rank() == lost:
        setattr(*SAVES[where], lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL))
    handle = training.save(place, 2, wait=wait)
    if not wait:
        handle.wait()


@pytest.mark.parametrize(
    ("lost", "where", "wait"),
    [(1, "write", True), (0, "manifest", True), (0, "rename", True), (1, "write", False), (0, "publish", False)],
)
def test_a_rank_that_dies_while_saving_leaves_the_last_checkpoint_whole(
    tmp_path: Path, lost: int, where: str, wait: bool
) -> None:
    outcomes = launch(die_while_saving, tmp_path, lost, where, wait, mesh=(1, 2))
    assert outcomes[lost].exit_code == -signal.SIGKILL
    other = outcomes[1 - lost]
    assert other.error == "CheckpointError", other
    assert f"saving step 2 in {tmp_path} failed: rank {lost} has ended, or takes no part" in other.message
    assert convmesh.latest_checkpoint(tmp_path) == tmp_path / "step-000000001"
    Training(None).load(tmp_path)


def test_a_training_goes_on_from_the_last_whole_checkpoint(tmp_path: Path) -> None:
    launch(die_while_saving, tmp_path, 0, "manifest", True, mesh=(1, 2))
    losses, state = train(None, tmp_path, 1, 3)
    straight, expected = train(None, tmp_path / "one", 0, 3)
    assert losses == pytest.approx(straight[1:], rel=1e-12, abs=0)
    for name in state:
        torch.testing.assert_close(state[name], expected[name], rtol=1e-12, atol=1e-14)


def full_disk(*_: Any, **__: Any) -> Any:
    raise OSError(errno.ENOSPC, "No space left on device")


def fails(what: Callable[[], Any], *said: str) -> None:
    with pytest.raises(convmesh.CheckpointError) as caught:
        what()
    for part in said:
        assert part in str(caught.value), (part, str(caught.value))


class Stubborn:
    """Its state cannot be loaded on one rank."""

    def state_dict(self) -> dict[str, int]:
        return {"x": 1}

    def load_state_dict(self, state: dict[str, int]) -> None:
        if dist.get_rank() == 1:
            raise KeyError("momentum")


def fail_on_one_rank(mesh: DeviceMesh, place: Path) -> None:
    shards._SHARED_BYTES = 1  # so that both ranks have something to write
    training, rank = Training(mesh), dist.get_rank()
    training.step(0)
    for at in ("write", "publish"):
        with pytest.MonkeyPatch.context() as patch:
            if rank == (1 if at == "write" else 0):
                patch.setattr(*SAVES[at], full_disk)
            for wait in (True, False):
                handle = None if wait else training.save(place, 1, wait=False)
                save = (lambda: training.save(place, 1)) if handle is None else handle.wait
                fails(save, f"on rank {int(at == 'write')}: saving step 1", "OSError: [Errno 28] No space left")
    dist.barrier()
    assert not any(place.iterdir())  # what was not finished is gone
    value = object() if rank == 1 else 1
    fails(lambda: training.save(place, 1, value=value), "on rank 1: ", "value is a builtins.object")
    more = [distribute_tensor(torch.ones(2), mesh, [Replicate(), Shard(0)])][:rank]
    fails(lambda: training.save(place, 1, more=more), "tensors that the first rank does not have: more/0")
    fails(lambda: training.save(place, rank), "ranks do different things", "rank 1: saving step 1 in ")
    convmesh.save_checkpoint(place, training.model, training.optimizer, step=1, stubborn=Stubborn())
    before = {name: whole(tensor) for name, tensor in training.model.state_dict().items()}
    training.step(1)
    after = {name: whole(tensor) for name, tensor in training.model.state_dict().items()}
    random_state, state = torch.get_rng_state(), training.optimizer.state[training.model[0].weight]["exp_avg"]
    load = lambda **extra: convmesh.load_checkpoint(place, training.model, training.optimizer, **extra)  # noqa: E731
    fails(lambda: load(stubborn=Stubborn()), "on rank 1: loading the last", "KeyError: 'momentum'")
    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            patch.setattr(files, "read", full_disk)
        fails(load, "on rank 1: loading the last checkpoint", "OSError: [Errno 28]")
    for name, tensor in training.model.state_dict().items():
        assert torch.equal(whole(tensor), after[name])
    assert torch.equal(random_state, torch.get_rng_state())
    assert training.optimizer.state[training.model[0].weight]["exp_avg"] is state
    load()
    for name, tensor in training.model.state_dict().items():
        assert torch.equal(whole(tensor), before[name])


def save_in_the_background(mesh: DeviceMesh, place: Path) -> None:
    """Nothing is written before the training has gone on by a step, with its own communication."""
    training, go_on, write = Training(mesh), threading.Event(), files.write
    training.step(0)
    expected = {name: whole(tensor) for name, tensor in training.model.state_dict().items()}

    def later(*args: Any) -> Any:
        go_on.wait()
        return write(*args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(files, "write", later)
        handle = training.save(place, 1, wait=False)
        training.step(1)
        assert not handle.done()
        go_on.set()
        second = training.save(place, 2)  # waits for the first
    assert handle.done()
    assert (handle.wait(), second) == (place / "step-000000001", place / "step-000000002")
    training.load(place, step=1)
    for name, tensor in training.model.state_dict().items():
        assert torch.equal(whole(tensor), expected[name])
    training.save(place, 3, wait=False)
    assert convmesh.latest_checkpoint(place) == place / "step-000000003"  # waits, too


def save_as_two_jobs(mesh: DeviceMesh, place: Path) -> list[str]:
    """Every rank is a job of its own, and both save the same steps in one folder at the same time."""
    alone = [dist.new_group([rank]) for rank in range(2)][dist.get_rank()]
    model, paths = nn.Linear(4, 4), []
    for step in range(5):
        dist.barrier()
        nn.init.constant_(model.weight, dist.get_rank() + 10 * step)
        paths.append(convmesh.save_checkpoint(place, model, step=step, process_group=alone, mine=model.weight))
    dist.barrier()
    for step in range(5):
        found = convmesh.load_checkpoint(place, model, step=step, process_group=alone)
        assert torch.equal(found.extra["mine"], model.weight)
    return [path.name for path in paths]


def on_a_part_of_the_ranks(mesh: DeviceMesh, place: Path) -> None:
    part = DeviceMesh("cpu", [1], mesh_dim_names=("h",))
    model = convmesh.distribute(nn.Conv2d(1, 1, 1), part)
    if dist.get_rank() == 0:
        said = ("rank 0 is none of those of the model's mesh, [1]", "process_group=dist.group.WORLD")
        fails(lambda: convmesh.save_checkpoint(place, model, step=0), *said)
    else:
        convmesh.save_checkpoint(place, model, step=0)
    dist.barrier()
    optimizer, everyone = torch.optim.Adam(model.parameters()), dist.group.WORLD
    for step in (1, 2):
        model(convmesh.shard(torch.ones(1, 1, 2, 2), part, h=2)).sum().backward()
        optimizer.step()
        convmesh.save_checkpoint(place, model, optimizer, step=step, process_group=everyone)
        assert convmesh.load_checkpoint(place, model, optimizer, process_group=everyone).step == step
    dist.barrier()
    plain = nn.Conv2d(1, 1, 1)
    its_optimizer = torch.optim.Adam(plain.parameters())
    convmesh.load_checkpoint(place, plain, its_optimizer)
    assert its_optimizer.state[plain.weight]["step"] == 2
    assert its_optimizer.state[plain.weight]["exp_avg"].item() > 0


def test_errors_of_one_rank_are_those_of_all(tmp_path: Path) -> None:
    check(launch(everything, tmp_path, mesh=(1, 2)))
    names = {path.name for path in (tmp_path / "jobs").iterdir()}
    assert names == {f"step-00000000{step}{again}" for step in range(5) for again in ("", "-1")}


def everything(mesh: DeviceMesh, place: Path) -> None:
    for work in (fail_on_one_rank, save_in_the_background, on_a_part_of_the_ranks):
        work(mesh, place / work.__name__)
    save_as_two_jobs(mesh, place / "jobs")


def check(outcomes: list[Any]) -> None:
    for outcome in outcomes:
        assert outcome.error is None, outcome.message
        assert outcome.exit_code == 0
