"""Seeing what a rank makes and receives: by size, whatever carried it."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate

import convmesh
from convmesh import _torch
from convmesh.comm.reduce import all_gather_stacked
from convmesh.comm.shared_memory import mailbox
from tests.cases import place
from tests.gathers import Sizes, is_sent_whole, is_whole
from tests.harness import Pool

NUMBERS = 1024
BYTES = NUMBERS * 8


def redistributed(mesh: DeviceMesh, part: torch.Tensor, whole: torch.Tensor) -> None:
    place(whole, mesh, (0,)).redistribute(mesh, [Replicate()]).to_local().sum()


def sent(mesh: DeviceMesh, part: torch.Tensor, whole: torch.Tensor) -> None:
    count, ranks = len(part), mesh.size()
    _torch.wait(_torch.all_to_all(part.repeat(ranks), [count] * ranks, [count] * ranks, mesh.get_group()))


def added_up(mesh: DeviceMesh, part: torch.Tensor, whole: torch.Tensor) -> None:
    _torch.wait(_torch.all_reduce(whole, "sum", mesh.get_group()))


def put_together(mesh: DeviceMesh, part: torch.Tensor, whole: torch.Tensor) -> None:
    all_gather_stacked(part, mesh, (0,))


def by_torch(mesh: DeviceMesh, part: torch.Tensor, whole: torch.Tensor) -> None:
    dist.all_gather([torch.empty_like(part) for _ in range(mesh.size())], part, group=mesh.get_group())


def broadcast(mesh: DeviceMesh, part: torch.Tensor, whole: torch.Tensor) -> None:
    dist.broadcast(whole, group=mesh.get_group(), group_src=0)


WAYS: dict[Callable[..., None], float] = {
    # What arrives, of all numbers: the other rank's half, or what is put together.
    redistributed: 1.0, sent: 0.5, added_up: 1.0, put_together: 0.5, by_torch: 1.0, broadcast: 1.0,
}  # fmt: skip


def received(mesh: DeviceMesh, shares_memory: bool) -> dict[str, float]:
    whole = torch.arange(NUMBERS, dtype=torch.float64)
    part = whole.chunk(mesh.size())[mesh.get_local_rank()]
    found = {}
    with convmesh.enable():
        group = mesh.get_group()
        known = mailbox.mailbox_of(group)
        assert known is not None
        mailbox._mailboxes[group] = known if shares_memory else None
        for way in WAYS:
            with Sizes() as sizes:
                way(mesh, part, whole)
            assert sizes.received == sizes.received_at_once
            found[way.__name__] = sizes.received / BYTES
        mailbox._mailboxes[group] = known
    return found


def test_what_arrives_is_seen_whatever_carried_it(pool: Pool) -> None:
    for shares_memory in (True, False):
        for found in pool.run(received, shares_memory, mesh=(2,)):
            assert found == {way.__name__: share for way, share in WAYS.items()}


def test_memory_counts_and_not_shapes() -> None:
    x = torch.ones(4, 8)
    with Sizes() as sizes:
        x.expand(1000, 4, 8).transpose(0, 1)[1:].view_as(x.expand(1000, 4, 8).transpose(0, 1)[1:])
        x.add_(1).mul_(2)
        torch.empty(10**6, device="meta")
        with FakeTensorMode():
            torch.empty(10**6)
    assert sizes.largest == 0
    with sizes:
        x[:1].clone().sum()
    assert (sizes.largest, sizes.received) == (32, 0)
    assert "clone" in sizes.maker


def halves(mesh: DeviceMesh) -> tuple[bool, bool, bool, bool]:
    """What a local operator is, and what a gather is."""
    x = torch.ones(NUMBERS, dtype=torch.float64)
    with Sizes() as one:
        x * 2
    with convmesh.enable():
        placed = place(x, mesh, (0,))
        with Sizes() as local:
            placed * 2
        with Sizes() as whole:
            placed.full_tensor()
    given = [(x, (0,))]
    return (
        is_whole(one, local, x),
        is_whole(one, whole, x),
        is_sent_whole(one, local, given),
        is_sent_whole(one, whole, given),
    )


def test_a_gather_is_told_from_a_local_operator(pool: Pool) -> None:
    assert set(pool.run(halves, mesh=(4,))) == {(False, True, False, True)}
