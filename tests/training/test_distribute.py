"""A distributed model trains as one process does, and sums each gradient once."""

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
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.debug import CommDebugMode

import convmesh
from tests.compare import assert_close, same_on_all_ranks
from tests.harness import Pool

NAMES = ("data", "h", "w")
LAYOUTS: list[tuple[tuple[int, ...], dict[str, int]]] = [
    ((4,), {"data": 0}),
    ((2, 2), {"data": 0, "h": 2}),
    ((1, 2, 2), {"data": 0, "h": 2, "w": 3}),
]


class Net(nn.Module):
    """A shared, a frozen and an unused parameter, a buffer; constants, an index, random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1, bias=False)  # before a norm its gradient is rounding
        self.norm = nn.BatchNorm2d(8)
        self.left = nn.Conv2d(8, 8, 3, padding=1)
        self.right = nn.Conv2d(8, 8, 3, padding=1)
        self.right.weight = self.left.weight
        self.frozen = nn.Conv2d(8, 8, 1).requires_grad_(False)
        self.unused = nn.Linear(3, 3)
        self.head = nn.Conv2d(8, 2, 1)
        self.register_buffer("scale", torch.linspace(0.5, 1.5, 8).view(1, 8, 1, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.norm(self.stem(x)))
        x = self.left(x) + self.right(x.flip(3))
        rows = torch.linspace(-1, 1, x.shape[2], dtype=x.dtype, device=x.device)
        x = x * rows[:, None] + rows.square().view(1, 1, -1, 1) * self.scale
        x = F.dropout2d(x, 0.2, self.training)
        if self.training:  # drops whole samples: random numbers that are drawn as a plain tensor
            x = x * (torch.rand(x.shape[0], 1, 1, 1, device=x.device) < 0.9)
        order = torch.tensor([1, 0, 3, 2, 5, 4, 7, 6], device=x.device)
        return self.head(self.frozen(x)[:, order])


def data(step: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(4, 3, 9, 10, generator=generator, dtype=torch.float64)
    return x, torch.randint(2, (4, 9, 10), generator=generator)


def build(mesh: DeviceMesh | None, seed: int = 0, **options: Any) -> nn.Module:
    torch.manual_seed(seed)
    model = Net().double()
    return model if mesh is None else convmesh.distribute(model, mesh, **options)


def loss_of(model: nn.Module, mesh: DeviceMesh | None, dims: dict[str, int], step: int = 0) -> torch.Tensor:
    x, target = data(step)
    if mesh is not None:
        x = convmesh.shard(x, mesh, **dims)
        target = convmesh.shard(target, mesh, **{name: max(0, dim - 1) for name, dim in dims.items()})
    return F.cross_entropy(model(x), target)


def assert_same_gradients(model: nn.Module, expected: nn.Module) -> None:
    for (name, actual), wanted in zip(model.named_parameters(), expected.parameters(), strict=True):
        if wanted.grad is None:
            assert actual.grad is None, name
            continue
        gradient = actual.grad
        assert isinstance(gradient, DTensor), name
        assert all(isinstance(placement, Replicate) for placement in gradient.placements), (name, gradient.placements)
        try:
            assert_close(gradient.to_local(), wanted.grad)
        except AssertionError as error:
            raise AssertionError(f"{name}: {error}") from None


Script = Callable[[nn.Module, Any, dict[str, int]], None]


def once(model: nn.Module, mesh: Any, dims: dict[str, int]) -> None:
    loss_of(model, mesh, dims).backward()


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


def count_messages(mesh: DeviceMesh, bucket_bytes: int) -> tuple[int, int, int]:
    """(gradients, all-reduces of one backward pass, those of a step after it)"""
    dims = {"data": 0, "h": 2}
    with convmesh.enable():
        model = build(mesh, bucket_bytes=bucket_bytes).eval()
        optimizer = torch.optim.AdamW(model.parameters())
        loss = loss_of(model, mesh, dims)
        with CommDebugMode() as counted:
            loss.backward()
        backward = counted.get_comm_counts()
        with CommDebugMode() as counted:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
    sums = {op: number for op, number in backward.items() if "all_reduce" in str(op)}
    others = {op: number for op, number in backward.items() if "all_gather" in str(op) and number}
    assert not others
    gradients = sum(parameter.grad is not None for parameter in model.parameters())
    return gradients, sum(sums.values()), counted.get_total_counts()


def test_one_all_reduce_for_each_bucket(pool: Pool) -> None:
    gradients, messages, later = same_on_all_ranks(pool.run(count_messages, 25 << 20, mesh=(2, 2), names=NAMES[:2]))
    assert (messages, later) == (1, 0)
    gradients, messages, later = same_on_all_ranks(pool.run(count_messages, 1, mesh=(2, 2), names=NAMES[:2]))
    assert (messages, later) == (gradients, 0)


class Scaled(torch.nn.Module):
    """A parameter that is broadcast over space, as layer scales and learned biases are."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = torch.nn.Conv2d(3, 3, 3, padding=1, dtype=torch.float64)
        self.scale = torch.nn.Parameter(torch.full((3, 1, 1), 0.5, dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.scale * self.conv(x)
        return y


def sums_of_backward(mesh: DeviceMesh) -> int:
    torch.manual_seed(0)
    expected = Scaled()
    x = torch.randn(2, 3, 7, 5, dtype=torch.float64)
    expected(x).square().sum().backward()
    with convmesh.enable():
        model = convmesh.distribute(copy.deepcopy(expected), mesh)
        loss = model(convmesh.shard(x, mesh, data=0, h=2)).square().sum()
        with CommDebugMode() as counted:
            loss.backward()
    assert_same_gradients(model, expected)
    return sum(number for op, number in counted.get_comm_counts().items() if "all_reduce" in str(op))


def test_the_gradient_of_a_broadcast_parameter_goes_with_its_bucket(pool: Pool) -> None:
    assert same_on_all_ranks(pool.run(sums_of_backward, mesh=(2, 2), names=NAMES[:2])) == 1


def reads_during_backward(mesh: DeviceMesh) -> None:
    """A full bucket leaves at once: what a hook finds afterwards is the sum, and what it writes there stays."""
    dims = {"data": 0, "h": 2}
    expected, model = build(None).eval(), build(mesh, bucket_bytes=1).eval()
    once(expected, None, dims)
    found = {}

    def double(parameter: torch.Tensor) -> None:
        assert isinstance(parameter.grad, DTensor)
        assert parameter.grad.placements == (Replicate(), Replicate())
        found[parameter] = parameter.grad.to_local().clone()
        parameter.grad.mul_(2)

    loss = loss_of(model, mesh, dims)  # after the first forward pass, so that the sums are under way before the hook
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(double)
    loss.backward()
    for parameter, wanted in zip(model.parameters(), expected.parameters(), strict=True):
        if wanted.grad is not None:
            assert_close(found.pop(parameter), wanted.grad)
            assert_close(parameter.grad.to_local(), 2 * wanted.grad)
    assert not found
    convmesh.disable()


def test_a_gradient_whose_bucket_has_left_is_its_sum(pool: Pool) -> None:
    pool.run(reads_during_backward, mesh=(2, 2), names=NAMES[:2])


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
