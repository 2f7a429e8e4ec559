"""Messages through shared memory: between two ends in one process, and between processes."""

from __future__ import annotations

import os
import random
import sys

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh

import convmesh
from convmesh import _torch
from convmesh.comm.shared_memory import mailbox
from convmesh.comm.shared_memory.mailbox import Mailbox, collect, collect_all, mailbox_of
from convmesh.comm.shared_memory.neighbour import Address, Neighbour
from convmesh.comm.shared_memory.outbox import FIRST, KEPT, ORDERED, SLOTS, OwnOutbox
from tests.harness import Pool

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="messages go by gloo on other systems")


class Pair:
    """Two ranks' ends, in this process."""

    def __init__(self, seconds: float = 60) -> None:
        self.boxes = [OwnOutbox(), OwnOutbox()]
        self.ends = [
            Mailbox(
                here, self.boxes[here], {1 - here: Neighbour(Address.of(self.boxes[1 - here]), 1 - here, here, seconds)}
            )
            for here in range(2)
        ]

    def post(self, here: int, numbers: torch.Tensor, receive: int) -> torch.Tensor:
        """All of `numbers` for the other end."""
        counts = [0, len(numbers)] if here == 0 else [len(numbers), 0]
        return self.ends[here].post(numbers, [0, receive] if here == 0 else [receive, 0], counts)

    def file_sizes(self) -> list[int]:
        return [os.fstat(box.file).st_size for box in self.boxes]


def awaited(tensor: torch.Tensor) -> torch.Tensor:
    collect(tensor)
    return tensor


def test_messages_of_any_kind_and_size_arrive_in_whatever_order_they_are_awaited() -> None:
    pair, choose = Pair(), random.Random(0)
    for dtype in (torch.float64, torch.int8, torch.bool, torch.bfloat16):
        expected, found = [], []
        for _ in range(20):
            sizes = [choose.choice([0, 1, 3, 1000]) for _ in range(2)]
            sent = [torch.randn(size, 3).to(dtype) for size in sizes]
            expected += reversed(sent)
            found += [pair.post(here, sent[here], sizes[1 - here]) for here in range(2)]
        for number in choose.sample(range(len(found)), len(found)):
            assert torch.equal(awaited(found[number].view(-1, 3)), expected[number])
    rows_of_nothing = torch.empty(4, 0)
    found = [pair.post(here, rows_of_nothing, 4) for here in range(2)]
    assert [awaited(tensor).shape for tensor in found] == [(4, 0), (4, 0)]


def test_what_a_rank_sends_to_itself_does_not_travel() -> None:
    pair = Pair()
    first = pair.ends[0].post(torch.tensor([1.0, 2, 3]), [2, 1], [2, 1])
    second = pair.ends[1].post(torch.tensor([4.0, 5, 6]), [1, 2], [1, 2])
    assert awaited(first).tolist() == [1, 2, 4]
    assert awaited(second).tolist() == [3, 5, 6]


def test_large_messages_have_their_memory_for_as_long_as_they_travel() -> None:
    pair, large = Pair(), torch.randn(KEPT // 4)
    under_way = pair.post(0, large, 1)
    second = pair.post(1, torch.ones(1), len(large))
    after = pair.post(0, large[:5], 1)
    assert pair.file_sizes()[0] > 4 * len(large)
    last = pair.post(1, torch.ones(1), 5)
    assert torch.equal(awaited(second), large)
    assert torch.equal(awaited(last), large[:5])
    assert awaited(under_way).item() == awaited(after).item() == 1
    pair.post(0, torch.ones(1), 0)
    assert pair.file_sizes() == [KEPT, KEPT]
    pair.post(1, torch.ones(0), 1)
    grown = pair.post(0, large, 0), pair.post(1, torch.ones(0), len(large))
    assert torch.equal(awaited(grown[1]), large)


def test_memory_is_used_again_and_nobody_has_to_wait() -> None:
    pair = Pair()
    for _ in range(3 * SLOTS):
        for here in range(2):
            pair.post(here, torch.ones(5), 5)
    assert max(stop for box in pair.boxes for _, _, stop in box._unread) < FIRST + 1000
    collect_all()
    assert not mailbox._letters


def test_a_rank_waits_for_one_that_is_far_behind() -> None:
    pair = Pair(seconds=0.05)
    for _ in range(SLOTS):
        pair.post(0, torch.ones(1), 0)
    with pytest.raises(RuntimeError, match="rank 1 has not answered"):
        pair.post(0, torch.ones(1), 0)
    found = [pair.post(1, torch.ones(0), 1) for _ in range(SLOTS)]
    assert all(awaited(tensor).item() == 1 for tensor in found)
    pair.post(0, torch.ones(1), 0)
    pair.post(1, torch.ones(0), 1)
    collect_all()


def test_a_message_of_another_size_is_no_message() -> None:
    pair = Pair()
    pair.post(0, torch.ones(3), 0)
    with pytest.raises(RuntimeError, match="rank 0 has sent 12 bytes where 16 were expected"):
        collect(pair.post(1, torch.ones(0), 4))
    mailbox._letters.clear()


@pytest.mark.parametrize(("receive", "send"), [([0, 1], [0, 3]), ([1, 1], [0, 2]), ([0, 1], [0, 1])])
def test_counts_that_do_not_fit(receive: list[int], send: list[int]) -> None:
    with pytest.raises(RuntimeError, match="2 rows cannot be sent"):
        Pair().ends[0].post(torch.ones(2), receive, send)


def test_other_machines_are_not_visited() -> None:
    box = OwnOutbox()
    with pytest.raises(OSError, match="another machine"):
        Neighbour(Address(("elsewhere", "pid"), os.getpid(), box.file), 1, 0, 1.0)


def everybody(mesh: DeviceMesh) -> list[float]:
    group, ranks = mesh.get_group(), mesh.size()
    numbers = torch.full((ranks,), float(mesh.get_local_rank()))
    received: list[float] = _torch.wait(_torch.all_to_all(numbers, [1] * ranks, [1] * ranks, group)).tolist()
    return received


def by_mail(mesh: DeviceMesh) -> tuple[list[float], bool]:
    with convmesh.enable():
        return everybody(mesh), mailbox_of(mesh.get_group()) is not None


@pytest.mark.parametrize("shape", [(2,), (4,)])
def test_ranks_of_one_machine_share_memory(pool: Pool, shape: tuple[int, ...]) -> None:
    ranks = list(range(*shape))
    assert pool.run(by_mail, mesh=shape) == [(ranks, ORDERED) for _ in ranks]


def not_on_one_rank(mesh: DeviceMesh) -> tuple[list[float], bool]:
    group, permitted = mesh.get_group(), os.memfd_create
    before = mailbox_of(group)
    del mailbox._mailboxes[group]
    if mesh.get_local_rank() == 1:
        os.memfd_create = refused
    try:
        return by_mail(mesh)
    finally:
        os.memfd_create = permitted
        mailbox._mailboxes[group] = before


def refused(*_: object) -> int:
    raise PermissionError("not here")


def test_all_go_by_gloo_where_one_cannot_share(pool: Pool) -> None:
    assert pool.run(not_on_one_rank, mesh=(2,)) == [([0, 1], False)] * 2


def disabled(mesh: DeviceMesh) -> list[float]:
    with convmesh.enable():
        numbers = torch.full((2,), float(mesh.get_local_rank()))
        under_way = _torch.all_to_all(numbers, [1, 1], [1, 1], mesh.get_group())
    received: list[float] = _torch.wait(under_way).tolist()
    return received


def test_what_is_under_way_when_convmesh_ends_arrives(pool: Pool) -> None:
    assert pool.run(disabled, mesh=(2,)) == [[0, 1]] * 2
