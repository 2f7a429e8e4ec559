"""Copying, moving and converting a distributed model while gradients exist, as with any other model."""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

import convmesh
from tests.compare import assert_close
from tests.harness import Pool
from tests.training.small_net import assert_same_gradients, build, loss_of

DIMS = {"data": 0, "h": 2}


def rounded(model: nn.Module) -> nn.Module:
    """There and back; gradients, which differ by rounding, are left out of it."""
    model.zero_grad()
    return model.float().double()


MOVES: dict[str, Callable[[nn.Module], nn.Module]] = {
    "copied": copy.deepcopy,
    "copied twice": lambda model: copy.deepcopy(copy.deepcopy(model)),
    "moved": lambda model: model.cpu(),
    "converted": lambda model: model.double(),
    "rounded": rounded,
    "laid otherwise": lambda model: model.to(memory_format=torch.channels_last),
}


def check(mesh: DeviceMesh, name: str) -> None:
    """What one process keeps of the gradients is there after the move, and the next ones are added to it."""
    models = [build(None).eval(), build(mesh, bucket_bytes=1000).eval()]
    outputs = []  # they stay alive
    for number, model in enumerate(models):
        outputs.append(loss_of(model, (None, mesh)[number], DIMS))
        outputs[-1].backward()
        models[number] = MOVES[name](model)
        loss_of(models[number], (None, mesh)[number], DIMS, 1).backward()
        optimizer = torch.optim.SGD(models[number].parameters(), lr=0.1, momentum=0.9)
        optimizer.step()
    expected, actual = models
    assert_same_gradients(actual, expected)
    for mine, wanted in zip(actual.parameters(), expected.parameters(), strict=True):
        assert isinstance(mine, DTensor)
        assert_close(mine.full_tensor(), wanted)
    convmesh.disable()


def test_a_model_is_moved_with_its_gradients(pool: Pool) -> None:
    pool.run_cases(check, list(MOVES), mesh=(2, 2), names=("data", "h"))


def check_copies(mesh: DeviceMesh) -> None:
    """A tensor that is a part of a larger memory; its attributes and gradient, and those of what shares it."""
    with convmesh.enable():
        local = torch.arange(8.0)[3:]
        leaf = DTensor.from_local(local, mesh, [Replicate()], run_check=False).requires_grad_()
        leaf.mark = ["no weight decay"]
        (leaf * 2).sum().backward()
        one, same = copy.deepcopy([leaf, leaf])
        assert one is same
        assert one.requires_grad
        assert one.mark == leaf.mark
        assert one.mark is not leaf.mark
        assert torch.equal(one.grad.to_local(), torch.full((5,), 2.0))
        assert one.grad is not leaf.grad
        with torch.no_grad():
            one.zero_()
        assert torch.equal(local, torch.arange(3.0, 8.0))
        assert one.device_mesh is mesh
        parameter = nn.Parameter(leaf.detach())
        parameter.grad = leaf.grad
        assert isinstance(copy.deepcopy(parameter), nn.Parameter)
        assert copy.deepcopy(parameter).grad is None  # as of any parameter


def test_a_copy_is_one_in_every_respect(pool: Pool) -> None:
    pool.run(check_copies, mesh=(2,))
