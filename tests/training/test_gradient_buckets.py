"""Gradients are summed in buckets while backward runs: how many messages it takes, and what is seen meanwhile."""

from __future__ import annotations

import copy

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.debug import CommDebugMode

import convmesh
from tests.compare import assert_close, same_on_all_ranks
from tests.harness import Pool
from tests.training.small_net import NAMES, assert_same_gradients, build, loss_of, once


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
