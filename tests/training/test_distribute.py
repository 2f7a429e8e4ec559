"""A distributed model trains as one process does."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import convmesh
from tests.compare import assert_close, same_on_all_ranks
from tests.harness import Pool
from tests.training.small_net import NAMES, Net, assert_same_gradients, build, data, loss_of, once

LAYOUTS: list[tuple[tuple[int, ...], dict[str, int]]] = [
    ((4,), {"data": 0}),
    ((2, 2), {"data": 0, "h": 2}),
    ((1, 2, 2), {"data": 0, "h": 2, "w": 3}),
]
Script = Callable[[nn.Module, Any, dict[str, int]], None]


def twice_summed_each_time(model: nn.Module, mesh: Any, dims: dict[str, int]) -> None:
    for step in range(2):
        loss_of(model, mesh, dims, step).backward()


def accumulated(model: nn.Module, mesh: Any, dims: dict[str, int]) -> None:
    for step in range(3):
        if mesh is None or step == 2:
            loss_of(model, mesh, dims, step).backward()
            continue
        with convmesh.no_sync(model):
            loss_of(model, mesh, dims, step).backward()
        assert any(parameter.grad.placements != parameter.placements for parameter in model.left.parameters())


def summed_then_accumulated(model: nn.Module, mesh: Any, dims: dict[str, int]) -> None:
    once(model, mesh, dims)
    accumulated(model, mesh, dims)


def zeroed_in_place(model: nn.Module, mesh: Any, dims: dict[str, int]) -> None:
    once(model, mesh, dims)
    model.zero_grad(set_to_none=False)
    loss_of(model, mesh, dims, 1).backward()


def two_losses_one_backward(model: nn.Module, mesh: Any, dims: dict[str, int]) -> None:
    (loss_of(model, mesh, dims) + 2 * loss_of(model, mesh, dims, 1)).backward()


def retained(model: nn.Module, mesh: Any, dims: dict[str, int]) -> None:
    loss = loss_of(model, mesh, dims)
    loss.backward(retain_graph=True)
    loss.backward()


def gradient_penalty(model: nn.Module, mesh: Any, dims: dict[str, int]) -> None:
    model.eval()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # that .grad and its parameter refer to each other: reset below
        loss_of(model, mesh, dims).backward(create_graph=True)
    penalty = sum(p.grad.square().sum() for p in model.parameters() if p.grad is not None)
    model.zero_grad()
    penalty.backward()


def unfrozen_later(model: nn.Module, mesh: Any, dims: dict[str, int]) -> None:
    once(model, mesh, dims)
    model.frozen.requires_grad_(True)
    once(model, mesh, dims)


def after_a_failure(model: nn.Module, mesh: Any, dims: dict[str, int]) -> None:
    def fail(gradient: torch.Tensor) -> None:
        raise RuntimeError("half-way")

    loss = loss_of(model, mesh, dims)
    handle = model.stem.weight.register_hook(fail)
    with pytest.raises(RuntimeError, match="half-way"):
        loss.backward()
    handle.remove()
    model.zero_grad()
    once(model, mesh, dims)


def checkpointed(model: nn.Module, mesh: Any, dims: dict[str, int]) -> None:
    forward = type(model).forward

    for reentrant in (False, True):

        def run(x: torch.Tensor, reentrant: bool = reentrant) -> torch.Tensor:
            return torch.utils.checkpoint.checkpoint(forward, model, x, use_reentrant=reentrant)

        model.forward = run  # type: ignore[method-assign]
        x, target = data()
        x.requires_grad_()
        if mesh is not None:
            x = convmesh.shard(x, mesh, **dims)
            target = convmesh.shard(target, mesh, **{name: max(0, dim - 1) for name, dim in dims.items()})
        F.cross_entropy(model(x), target).backward()


SCRIPTS: dict[str, Script] = {
    script.__name__: script
    for script in (
        once, twice_summed_each_time, accumulated, summed_then_accumulated, zeroed_in_place, two_losses_one_backward,
        retained, gradient_penalty, unfrozen_later, after_a_failure, checkpointed,
    )
}  # fmt: skip


def check(mesh: DeviceMesh, case: tuple[str, dict[str, int], int]) -> list[torch.Tensor]:
    name, dims, bucket_bytes = case
    expected = build(None)
    SCRIPTS[name](expected, None, dims)
    with convmesh.enable():
        # Another start on each rank: the first rank's counts.
        model = build(mesh, seed=mesh.get_rank(), bucket_bytes=bucket_bytes)
        assert model.left.weight is model.right.weight
        SCRIPTS[name](model, mesh, dims)
        assert_same_gradients(model, expected)
        for actual, wanted in zip(model.buffers(), expected.buffers(), strict=True):
            assert_close(actual.to_local(), wanted)
    return [parameter.grad.to_local() for parameter in model.parameters() if parameter.grad is not None]


@pytest.mark.parametrize(("mesh", "dims"), LAYOUTS)
def test_gradients_are_those_of_one_process(pool: Pool, mesh: tuple[int, ...], dims: dict[str, int]) -> None:
    cases = [(name, dims, bucket_bytes) for name in SCRIPTS for bucket_bytes in (1, 25 << 20)]
    for results in pool.run_cases(check, cases, mesh=mesh, names=NAMES[: len(mesh)]):
        same_on_all_ranks(results)


def copies(mesh: DeviceMesh) -> None:
    dims = {"data": 0, "h": 2}
    expected, model = build(None).eval(), build(mesh).eval()  # without random numbers, which differ from run to run
    copied = copy.deepcopy(model)
    once(expected, None, dims)
    once(copied, mesh, dims)
    assert_same_gradients(copied, expected)
    assert all(parameter.grad is None for parameter in model.parameters())
    once(model, mesh, dims)
    assert_same_gradients(model, expected)
    convmesh.disable()


def test_a_copy_of_a_model_trains_by_itself(pool: Pool) -> None:
    pool.run(copies, mesh=(2, 2), names=NAMES[:2])


def refusals(mesh: DeviceMesh) -> None:
    x, _ = data()
    with convmesh.enable():
        model = build(mesh)
        with pytest.raises(convmesh.ShardingError, match=r"is a plain torch\.Tensor\n  remedy: convmesh\.shard"):
            model(x)
        with pytest.raises(convmesh.ShardingError, match="distributed already"):
            convmesh.distribute(model, mesh)
        with pytest.raises(convmesh.ShardingError, match=r"weight is made by the first forward pass"):
            convmesh.distribute(nn.LazyConv2d(3, 3), mesh)
        with pytest.raises(convmesh.ShardingError, match="meta device"):
            convmesh.distribute(nn.Conv2d(3, 3, 3, device="meta"), mesh)
        with pytest.raises(convmesh.ShardingError, match="not distributed"), convmesh.no_sync(nn.ReLU()):
            pass
        # Outside of a model's forward pass, a plain tensor may be anything.
        with pytest.raises((convmesh.ShardingError, RuntimeError), match=r"plain|mixed"):
            convmesh.shard(x, mesh, data=0) * torch.ones(4, 1, 1, 1, dtype=torch.float64)
        once(model, mesh, {"data": 0})


def test_what_cannot_be_distributed(pool: Pool) -> None:
    pool.run(refusals, mesh=(2, 2), names=NAMES[:2])


class OneHotLoss(nn.Module):
    """Makes its target and its weights itself, as losses of other packages do, and has no parameters."""

    def forward(self, scores: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        wanted = torch.zeros(scores.shape, dtype=scores.dtype).scatter_(1, labels.unsqueeze(1), 1.0)
        weights = torch.tensor([1.0, 2.0], dtype=scores.dtype).view(1, 2, 1, 1)
        return (weights * (scores.softmax(1) - wanted).square()).mean()


def losses(model: nn.Module, loss: nn.Module, mesh: DeviceMesh | None, dims: dict[str, int]) -> list[torch.Tensor]:
    """The loss, the gradient of the input by torch.func, and one of the weights."""
    x, target = data()
    if mesh is not None:
        x = convmesh.shard(x, mesh, **dims)
        target = convmesh.shard(target, mesh, **{name: max(0, dim - 1) for name, dim in dims.items()})
    value = loss(model(x), target)
    value.backward()
    output, pull = torch.func.vjp(model, x)
    outputs = torch.func.vmap(lambda shift: model(x + shift), out_dims=1)(torch.func.vmap(torch.sum)(x))
    return [value, pull(output)[0], outputs.sum(1), *(p.grad for p in model.parameters() if p.grad is not None)]


def with_losses(mesh: DeviceMesh) -> None:
    """A checkpoint of one process, and a loss of another package: on the mesh they work as they are."""
    dims = {"data": 0, "h": 2}
    made = []
    for seed in (0, mesh.get_rank() + 1):
        torch.manual_seed(seed)
        model = Net().double().eval()
        model.head = nn.utils.parametrizations.weight_norm(nn.Conv2d(8, 2, 1).double())
        made.append(model)
    expected, model = made
    convmesh.distribute(model, mesh)
    model.load_state_dict(expected.state_dict())
    assert model.left.weight is model.right.weight
    loss = OneHotLoss()
    wanted = losses(expected, loss, None, dims)
    actual = losses(model, convmesh.distribute(loss, mesh), mesh, dims)
    for mine, other in zip(actual, wanted, strict=True):
        assert_close(mine.detach().full_tensor(), other.detach())
    convmesh.disable()


def test_losses_checkpoints_and_transforms_as_they_are(pool: Pool) -> None:
    pool.run(with_losses, mesh=(2, 2), names=NAMES[:2])
