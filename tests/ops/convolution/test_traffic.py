"""What a convolution sends: one exchange a split dimension, only what is needed, never a gathered activation."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import CommDebugMode

import convmesh
from convmesh.geometry import shards
from tests.cases import place
from tests.harness import Pool

SIZE = (23, 30)


def least_bytes(mesh: DeviceMesh, dim: int, kernel: int, stride: int, padding: int, others: int) -> int:
    """What this rank has to send at least, counted index by index, with all inputs of an output on its owner."""
    size, here = SIZE[dim - 2], mesh.get_local_rank()
    owned = [set(range(i.start, i.stop)) for i in shards(size, (mesh.size(),))]
    outputs = shards((size + 2 * padding - kernel) // stride + 1, (mesh.size(),))
    sent = 0
    for rank, mine in enumerate(outputs):
        if rank != here:
            reads = {o * stride - padding + tap for o in range(mine.start, mine.stop) for tap in range(kernel)}
            sent += len(reads & owned[here])
    return sent * others * 8


def named(counted: CommDebugMode) -> dict[str, int]:
    return {collective.__name__: count for collective, count in counted.get_comm_counts().items()}


def run(mesh: DeviceMesh, case: tuple[Any, ...]) -> dict[str, Any]:
    at, kernel, stride, padding, needs_input = case
    x = place(torch.randn(2, 3, *SIZE, dtype=torch.float64), mesh, at).requires_grad_(needs_input)
    w = place(torch.randn(4, 3, kernel, kernel, dtype=torch.float64), mesh, ("R",) * len(at)).requires_grad_()
    with convmesh.enable():
        with CommDebugMode() as forward, convmesh.count_traffic() as sent:
            y = F.conv2d(x, w, stride=stride, padding=padding)
        gradient = DTensor.from_local(
            torch.ones_like(y.to_local()), mesh, y.placements, shape=y.shape, stride=y.stride()
        )
        with CommDebugMode() as backward, convmesh.count_traffic() as sent_back:
            y.backward(gradient)
    least = least_bytes(mesh, at[0], kernel, stride, padding, 2 * 3 * SIZE[3 - at[0]] * 1) if mesh.ndim == 1 else None
    return {
        "forward": named(forward), "backward": named(backward),
        "sent": sent.bytes_sent, "sent back": sent_back.bytes_sent, "least": least,
    }  # fmt: skip


WINDOWS = [(3, 1, 1), (7, 1, 3), (4, 1, 2), (3, 2, 1), (2, 3, 0), (5, 2, 0)]


@pytest.mark.parametrize(("kernel", "stride", "padding"), WINDOWS)
@pytest.mark.parametrize("dim", [2, 3])
def test_only_what_is_needed_travels(pool: Pool, kernel: int, stride: int, padding: int, dim: int) -> None:
    for ranks in (2, 4):
        for counts in pool.run(run, ((dim,), kernel, stride, padding, True), mesh=(ranks,)):
            assert counts["forward"] in ({"all_to_all_single": 1}, {})
            assert counts["backward"] in ({"all_to_all_single": 1}, {})
            assert counts["sent"] == counts["least"]


def test_aligned_windows_send_nothing(pool: Pool) -> None:
    for counts in pool.run(run, ((3,), 3, 3, 0, True), mesh=(2,)):
        assert counts == {"forward": {}, "backward": {}, "sent": 0, "sent back": 0, "least": 0}


def test_one_exchange_a_split_dimension(pool: Pool) -> None:
    for counts in pool.run(run, ((2, 3), 3, 1, 1, True), mesh=(2, 2)):
        assert counts["forward"] == {"all_to_all_single": 2}
        assert counts["backward"] == {"all_to_all_single": 2}


def test_batch_sharding_sends_nothing(pool: Pool) -> None:
    for counts in pool.run(run, ((0, 0), 3, 1, 1, True), mesh=(2, 2)):
        assert (counts["forward"], counts["backward"]) == ({}, {})


def test_a_first_layer_fetches_the_thinner_side(pool: Pool) -> None:
    """Without an input gradient the weight's can be had from either halo: 3 channels of input, or 4 of output."""
    for counts in pool.run(run, ((3,), 3, 1, 1, False), mesh=(2,)):
        assert counts["sent back"] == 2 * 3 * SIZE[0] * 8
    for counts in pool.run(run, ((3,), 3, 1, 1, True), mesh=(2,)):
        assert counts["sent back"] == 2 * 4 * SIZE[0] * 8


def bias_only(mesh: DeviceMesh) -> dict[str, int]:
    x = place(torch.randn(2, 3, *SIZE), mesh, (3,))
    w = place(torch.randn(4, 3, 3, 3), mesh, ("R",))
    b = place(torch.randn(4), mesh, ("R",)).requires_grad_()
    with convmesh.enable():
        y = F.conv2d(x, w, b, padding=1)
        gradient = DTensor.from_local(
            torch.ones_like(y.to_local()), mesh, y.placements, shape=y.shape, stride=y.stride()
        )
        with CommDebugMode() as backward:
            y.backward(gradient)
    return named(backward)


def test_a_bias_gradient_alone_sends_nothing(pool: Pool) -> None:
    assert pool.run(bias_only, mesh=(2,)) == [{}, {}]
