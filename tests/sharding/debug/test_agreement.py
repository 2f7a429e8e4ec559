"""Ranks that take different paths through the code, with `enable(check=True)`."""

from __future__ import annotations

import re
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard

import convmesh
from convmesh import _torch, comm
from convmesh.sharding.debug import agreement
from convmesh.sharding.debug.rendezvous import Fingerprint, disagreement
from tests.cases import place
from tests.compare import assert_close
from tests.harness import Pool
from tests.launch import launch

KERNELS = (3, 5, 1)
RELU = 3
LAYERS = (0, 1, RELU, 2)
THE_ODD_ONE = 1


def operands() -> tuple[torch.Tensor, list[torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(2, 4, 9, 10), *((4, 4, kernel, kernel) for kernel in KERNELS)]
    x, *weights = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes)
    return x, weights


def network(x: torch.Tensor, weights: list[torch.Tensor], layers: tuple[int, ...] = LAYERS) -> torch.Tensor:
    for layer in layers:
        x = torch.relu(x) if layer == RELU else F.conv2d(x, weights[layer], padding=KERNELS[layer] // 2)
    return x.square().mean()


def step(mesh: DeviceMesh, layers: tuple[int, ...] = LAYERS, compiled: bool = False) -> list[torch.Tensor]:
    """Loss and gradients."""
    x, weights = operands()
    placed = [place(weight, mesh, ("R", "R")).requires_grad_() for weight in weights]
    run = torch.compile(network, backend="aot_eager", fullgraph=True) if compiled else network
    loss = run(place(x, mesh, (2, 3)), placed, layers)
    loss.backward()
    return [loss.full_tensor().detach(), *(w.grad.full_tensor() for w in placed if w.grad is not None)]


def keys_in_store() -> int:
    return _torch.store().num_keys()


def with_and_without(mesh: DeviceMesh, compiled: bool) -> list[torch.Tensor]:
    with convmesh.enable():
        plain = step(mesh, compiled=compiled)
    before = keys_in_store()
    with convmesh.enable(check=True):
        checked = step(mesh, compiled=compiled)
        step(mesh, compiled=compiled)
    dist.barrier()
    # Of each rank the last fingerprint is left, for each of its groups (along each mesh dimension, and all ranks), and
    # where it has last waited.
    assert keys_in_store() <= before + 4 * dist.get_world_size()
    for one, other in zip(checked, plain, strict=True):
        assert torch.equal(one, other)
    return checked


@pytest.mark.parametrize("compiled", [False, True])
def test_ranks_that_do_the_same_are_left_alone(pool: Pool, compiled: bool) -> None:
    x, weights = operands()
    leaves = [weight.requires_grad_() for weight in weights]
    loss = network(x, leaves)
    loss.backward()
    for rank in pool.run(with_and_without, compiled):
        for actual, expected in zip(rank, [loss, *(leaf.grad for leaf in leaves)], strict=True):
            assert_close(actual, expected)


def train_checked(mesh: DeviceMesh, dims: dict[str, int]) -> None:
    """Uneven and empty shards, norms, dropout, gradients in buckets, an optimizer: other work on each rank."""
    with convmesh.enable(check=True):
        layers = [
            nn.Conv2d(2, 4, 3, padding=1),
            nn.BatchNorm2d(4),
            nn.Dropout(0.5),
            nn.MaxPool2d(2),
            nn.Conv2d(4, 2, 3),
        ]
        model = convmesh.distribute(nn.Sequential(*layers), mesh)
        optimizer = torch.optim.AdamW(model.parameters())
        for _ in range(2):
            loss = model(convmesh.shard(torch.randn(3, 2, 10, 7), mesh, **dims)).square().mean()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()


def test_uneven_work_is_no_difference(pool: Pool) -> None:
    pool.run(train_checked, {"h": 2, "w": 3}, names=("h", "w"))
    pool.run(train_checked, {"w": 3}, mesh=(4,), names=("w",))
    pool.run(train_checked, {"data": 0, "w": 3}, names=("data", "w"))


def odd_layers(mesh: DeviceMesh, layers: tuple[int, ...], compiled: bool = False) -> None:
    convmesh.enable(check=True)
    step(mesh, compiled=compiled)
    step(mesh, layers if dist.get_rank() == THE_ODD_ONE else LAYERS, compiled)


@pytest.mark.parametrize(
    ("layers", "compiled"),
    [
        ((0, RELU, 2), False), ((0, 1, 2), False), ((0, 1, RELU), False),
        ((1, 0, RELU, 2), False), ((0, 0, RELU, 2), False), ((0, RELU, 2), True),
    ],
    ids=["skips a layer", "skips a relu", "skips a 1x1", "another order", "another kernel", "compiled"],
)  # fmt: skip
def test_a_rank_with_other_layers_is_an_error_on_every_rank(layers: tuple[int, ...], compiled: bool) -> None:
    outcomes = launch(odd_layers, layers, compiled)
    for outcome in outcomes:
        # A rank may already wait inside a communication, for one that has raised and ended.
        assert outcome.error in ("MismatchError", "CommunicationError"), outcome
        assert "test_agreement.py:" in outcome.message
    found = [
        outcome.message for outcome in outcomes if re.search(r"not doing the same|wait for each other", outcome.message)
    ]
    assert any(f"rank {THE_ODD_ONE}" in message for message in found)


def caught(mesh: DeviceMesh) -> tuple[str | None, str | None]:
    """A mismatch that all ranks catch, and what is left of it in the store, before and after they go on together."""
    convmesh.enable(check=True)
    with pytest.raises(convmesh.MismatchError):
        place(torch.ones(4, 8 if dist.get_rank() == THE_ODD_ONE else 6), mesh, ("P",)).full_tensor()
    dist.barrier()
    before = comm.posted()
    dist.barrier()
    place(torch.ones(4, 6), mesh, ("P",)).full_tensor()
    dist.barrier()
    return before, comm.posted()


def test_a_mismatch_that_was_caught_is_forgotten() -> None:
    for outcome in launch(caught, mesh=(2,), names=("w",)):
        before, after = outcome.result
        assert "not doing the same" in before
        assert after is None


def another_shape(mesh: DeviceMesh) -> None:
    convmesh.enable(check=True)
    x = place(torch.ones(4, 8 if dist.get_rank() == THE_ODD_ONE else 6), mesh, ("P", 1))
    x.redistribute(placements=[Replicate(), Shard(1)])


def test_what_dtensor_itself_sends_is_compared_too() -> None:
    outcomes = launch(another_shape)
    for rank in (1, 3):
        assert outcomes[rank].error == "MismatchError"
        assert "ranks 1, 3 (mesh dimension 'h') are not doing the same" in outcomes[rank].message


def groups_in_another_order(mesh: DeviceMesh) -> None:
    convmesh.enable(check=True)
    x = place(torch.ones(4, 6), mesh, ("P", "P"))
    # Each rank waits for the next one: 0 for 1 along "w", 1 for 3 along "h", 3 for 2, and 2 for 0.
    for mesh_dim in (1, 0) if dist.get_rank() in (0, 3) else (0, 1):
        placements = list(x.placements)
        placements[mesh_dim] = Replicate()
        x = x.redistribute(placements=placements)


def test_ranks_that_wait_in_a_circle_need_no_time_out() -> None:
    outcomes = launch(groups_in_another_order)
    assert {outcome.error for outcome in outcomes} == {"MismatchError"}
    first = next(outcome.message for outcome in outcomes if "another rank has stopped" not in outcome.message)
    assert "wait for each other: rank" in first
    assert "waits in all_reduce of (4, 6)" in first


def one_stays_away(mesh: DeviceMesh) -> Any:
    convmesh.enable(check=True, timeout=2)
    x = place(torch.ones(2, 3, 6, 6), mesh, ("R", 3))
    if dist.get_rank() == THE_ODD_ONE:
        time.sleep(6)
        return None
    return F.max_pool2d(x, 3, 1, 1)


def test_a_rank_that_does_not_come_is_missed_by_name() -> None:
    outcomes = launch(one_stays_away)
    assert outcomes[0].error == "MismatchError"
    assert "not all of ranks 0, 1 (mesh dimension 'w') came within 2 seconds: rank 1" in outcomes[0].message


def long_silence(mesh: DeviceMesh, odd_step: int) -> None:
    convmesh.enable(check=True)
    x = place(torch.ones(4, 4), mesh, (0, 1))
    for step in range(1000):
        x = x.abs() if dist.get_rank() == THE_ODD_ONE and step == odd_step else x.relu()
    x.full_tensor()


def test_an_old_difference_is_seen_and_few_operators_are_remembered() -> None:
    assert {outcome.error for outcome in launch(long_silence, -1)} == {None}
    assert "MismatchError" in {outcome.error for outcome in launch(long_silence, 3)}
    path = agreement._Path()
    for number in range(1000):
        path.note(str(number))
    assert len(path.operators) < 300


def without_a_store(mesh: DeviceMesh) -> None:
    host = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    client = dist.TCPStore("127.0.0.1", host.port, is_master=False)
    del host
    with pytest.MonkeyPatch.context() as patch, convmesh.enable(check=True):
        patch.setattr(_torch, "store", lambda: client)
        place(torch.ones(2), mesh, ("P",)).full_tensor()


def test_a_store_that_is_gone_is_a_failed_communication() -> None:
    for outcome in launch(without_a_store, mesh=(2,), names=("w",)):
        assert outcome.error == "CommunicationError"
        assert "the store through which ranks compare what they do" in outcome.message


def alone(mesh: DeviceMesh) -> None:
    with convmesh.enable(check=True):
        whole, part = place(torch.ones(3, 4), mesh, ("R", "R")), place(torch.ones(3, 4), mesh, (0, 1))
        if dist.get_rank() == THE_ODD_ONE:
            whole.mean()  # as for a line in a log
        assert part.mean().full_tensor().item() == 1


def test_what_is_whole_on_every_rank_a_rank_may_use_alone(pool: Pool) -> None:
    pool.run(alone)


def test_the_check_ends_with_its_block_and_not_with_an_inner_one() -> None:
    before = dict(_torch.handlers())
    with convmesh.enable():
        plain = dict(_torch.handlers())
        with convmesh.enable(check=True):
            checked = dict(_torch.handlers())
            with convmesh.enable():
                assert _torch.handlers() == checked != plain
            assert _torch.handlers() == checked
        assert _torch.handlers() == plain
    convmesh.enable(check=True)
    convmesh.disable()
    assert _torch.handlers() == before


def test_every_rank_sees_the_same_difference() -> None:
    def sending(sends: tuple[int, ...], receives: tuple[int, ...], what: str = "a") -> Fingerprint:
        return Fingerprint(what, ("op",), sends, receives, f"file:{sends}")

    right = [sending((0, 2, 0), (0, 1, 0)), sending((1, 0, 3), (2, 0, 0)), sending((0, 0, 0), (0, 3, 0))]
    assert disagreement(right) is None
    assert disagreement([*right[:2], sending((0, 0, 0), (0, 4, 0))]) == "what one sends is not what another expects"
    assert disagreement([*right[:2], sending((0, 0, 0), (0, 3, 0), "b")]) == "their communications differ"
    assert Fingerprint.unpack(right[0].pack().encode()) == right[0]
