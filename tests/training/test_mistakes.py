"""Mistakes of a training script that would train garbage, or nothing: they are said, with the call that helps."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

import convmesh
from convmesh import api
from convmesh.comm.agreed_facts import asked_anew
from convmesh.sharding import installation
from convmesh.training import same_data
from tests.harness import Pool

NAMES = ("data", "h")


def net() -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.PReLU(), nn.Flatten(2), nn.Linear(36, 2))


def batch(mesh: DeviceMesh) -> torch.Tensor:
    return convmesh.shard(torch.randn(4, 3, 6, 6), mesh, data=0)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, mesh: DeviceMesh) -> list[str]:
    """What was warned of."""
    model(batch(mesh)).square().mean().backward()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        optimizer.step()
    return [str(warning.message) for warning in caught]


def check_optimizers(mesh: DeviceMesh) -> None:
    plain = net()
    early = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9)
    plain(torch.randn(4, 3, 6, 6)).square().mean().backward()
    early.step()  # it has state already
    model = convmesh.distribute(plain, mesh)
    (said,) = step(model, early, mesh)
    assert "7 of the 7 parameters of this SGD are from before" in said
    assert "remedy: make the optimizer after convmesh.distribute(model, mesh)" in said
    assert "test_mistakes.py:" in said
    assert step(model, early, mesh) == []  # once

    late = torch.optim.SGD(model.parameters(), lr=0.1)
    assert step(model, late, mesh) == []
    mixed = torch.optim.SGD([*model.parameters(), *early.param_groups[0]["params"][:2]], lr=0.1)
    assert "2 of the 9 parameters" in step(model, mixed, mesh)[0]

    stranger = torch.optim.Adam(net().parameters())
    (said,) = step(model, stranger, mesh)
    assert "none of the 7 parameters of this Adam has a gradient" in said
    beside = net()  # a model of this rank alone, which is trained by itself
    beside(torch.randn(4, 3, 6, 6)).square().mean().backward()
    assert step(model, torch.optim.Adam(beside.parameters()), mesh) == []
    other = convmesh.distribute(net(), mesh)
    assert step(other, late, mesh) == []  # it does train something, as each of the two optimizers of a GAN does
    convmesh.disable()
    assert step_alone(torch.optim.SGD(early.param_groups[0]["params"], lr=0.1)) == []


def step_alone(optimizer: torch.optim.Optimizer) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        optimizer.step()
    return [str(warning.message) for warning in caught]


def test_optimizers_that_train_nothing(pool: Pool) -> None:
    pool.run(check_optimizers, mesh=(2, 2), names=NAMES)


def refused(words: str, attempt: Callable[[], Any]) -> None:
    """With the line of `attempt`, which is the user's."""
    line = attempt.__code__.co_firstlineno
    with pytest.raises(convmesh.ShardingError, match=words) as caught:
        attempt()
    assert f"\n  at {__file__}:{line}" in str(caught.value), str(caught.value)


DISTRIBUTE = r"remedy: .*convmesh\.distribute\(model, mesh\)"


def check_models(mesh: DeviceMesh) -> None:
    model, plain = convmesh.distribute(net(), mesh), net()
    x = batch(mesh)
    refused(r"remedy: convmesh\.shard", lambda: model(x.full_tensor()))
    refused(DISTRIBUTE, lambda: plain(x))
    for layer in (nn.Linear(6, 3), nn.GroupNorm(3, 3), nn.PReLU(), nn.BatchNorm2d(3).requires_grad_(False)):
        refused(DISTRIBUTE, lambda layer=layer: layer(x))
    for number in (nn.Parameter(torch.ones(())), nn.Parameter(torch.ones(1))):
        refused(DISTRIBUTE, lambda number=number: x * number)
    refused(rf"DistributedDataParallel.*{DISTRIBUTE[8:]}", lambda: DistributedDataParallel(model))
    unsynchronised = DistributedDataParallel(convmesh.distribute(nn.Conv2d(3, 4, 3), mesh), init_sync=False)
    refused(rf"DistributedDataParallel\n.*{DISTRIBUTE[8:]}", lambda: unsynchronised(x))
    refused("torch.distributed, allreduce_", lambda: torch.distributed.all_reduce(x))
    model(x)  # still works
    assert (x * torch.ones(())).shape == x.shape
    convmesh.disable()


def forgotten(mesh: DeviceMesh) -> None:
    """Nobody has switched the rules on: torch would compute wrong convolutions of the sharded image, silently."""
    x = convmesh.shard(torch.arange(36.0).view(1, 1, 6, 6), mesh, data=2)
    refused(DISTRIBUTE, lambda: nn.Conv2d(1, 1, 3)(x))
    ones = convmesh.replicate(torch.ones(1, 1, 3, 3), mesh)
    assert torch.equal(F.conv2d(x, ones).full_tensor(), F.conv2d(x.full_tensor(), ones.full_tensor()))


def test_a_sharded_tensor_brings_the_rules_unless_they_were_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api, "_told", False)
    for _ in range(2):  # the end of a simulation does not count as a decision
        convmesh.simulate(forgotten, (3,), ("data",))
        assert not installation.installed()
    convmesh.disable()
    with pytest.raises(RuntimeError, match=r"mixed torch\.Tensor and DTensor"):
        convmesh.simulate(forgotten, (3,), ("data",))


def test_models_and_inputs_that_do_not_go_together(pool: Pool) -> None:
    pool.run(check_models, mesh=(2, 2), names=NAMES)


def test_an_error_in_a_thread_without_a_line_of_the_users(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("convmesh.sharding.errors.caller", lambda: None)
    assert str(convmesh.ShardingError("what")) == "what"


def head() -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.Dropout2d(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout())


def check_draws(mesh: DeviceMesh, odd: int | None) -> None:
    """Numbers that a rank alone has drawn, after which its dropout is another one than the others'."""
    same_data._calls.get().clear()
    torch.manual_seed(mesh.get_rank())
    model = convmesh.distribute(head(), mesh)
    images = torch.ones(4, 3, 8, 8)

    def run() -> None:
        for _ in range(3):
            model(convmesh.shard(images, mesh, data=0, h=2))
            if mesh.get_rank() == odd:
                torch.rand(1)

    if odd is None:
        run()
    else:
        with pytest.raises(convmesh.ShardingError, match=f"different random numbers\n(.*\n)?  rank {odd}: "):
            run()


def test_random_numbers_that_differ(pool: Pool) -> None:
    pool.run_cases(check_draws, [None, 0, 3], mesh=(2, 2), names=NAMES)


def check_settings(mesh: DeviceMesh) -> list[str]:
    """Of a rank that computes with more threads than the others."""
    threads = torch.get_num_threads()
    said: list[list[str]] = []
    for odd in (False, True):
        with asked_anew(f"settings, of which one is odd: {odd}"), warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            torch.set_num_threads(threads + (odd and mesh.get_rank() == 2))
            convmesh.distribute(net(), mesh)
            torch.set_num_threads(threads)
        said.append([str(warning.message) for warning in caught])
    assert said[0] == []
    return said[1]


def test_processes_that_do_not_compute_alike(pool: Pool) -> None:
    for said in pool.run(check_settings, mesh=(2, 2), names=NAMES):
        (text,) = said
        assert "ranks 0, 1, 3: torch " in text
        assert "ranks 2: torch " in text


def check_drift(mesh: DeviceMesh, odd: int | None) -> list[str]:
    """A rank with another learning rate."""
    model = convmesh.distribute(net(), mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2 if mesh.get_rank() == odd else 0.1)
    return [said for _ in range(5) for said in step(model, optimizer, mesh)]


def test_parameters_that_drift_apart(pool: Pool) -> None:
    assert pool.run(check_drift, None, mesh=(2, 2), names=NAMES) == [[]] * 4
    for said in pool.run(check_drift, 1, mesh=(2, 2), names=NAMES):
        assert len(said) == 2  # before the second step, and before the fourth
        assert "but on ranks 0, 2, 3; 1\n  remedy: " in said[0]
