"""`convmesh.simulate`: errors of ranks, and ranks that do not do the same."""

from __future__ import annotations

import _thread
import signal
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import convmesh


class OddError(ValueError):
    """An error of a user's own."""


def test_an_error_of_a_rank() -> None:
    """It is raised as it is, with its traceback and a note; the others end where they would wait for it."""
    went_on: list[int] = []

    def fails(mesh: DeviceMesh) -> None:
        if dist.get_rank() == 5:
            raise OddError("of one rank")
        dist.barrier()
        went_on.append(dist.get_rank())

    with pytest.raises(OddError, match="of one rank") as caught:
        convmesh.simulate(fails, (4, 2), ("h", "w"))
    assert any("rank 5 (h=2, w=1) of 8" in note for note in caught.value.__notes__)
    assert any(entry.name == "fails" for entry in caught.traceback)
    assert not went_on

    def refused(mesh: DeviceMesh) -> None:
        x = distribute_tensor(torch.rand(8, 3), mesh, [Shard(0)], src_data_rank=None)
        with convmesh.enable():
            x + torch.rand(8, 3)

    with pytest.raises(convmesh.ShardingError, match="plain") as alike:
        convmesh.simulate(refused, 4)
    assert any("ranks 0-3 of 4" in note for note in alike.value.__notes__)

    def differently(mesh: DeviceMesh) -> None:
        raise [OddError, KeyError][dist.get_rank()](str(dist.get_rank()))

    with pytest.raises(OddError) as different:
        convmesh.simulate(differently, 2)
    assert any("KeyError: '1'" in note for note in different.value.__notes__)


def test_an_error_in_backward_and_inside_of_a_collective() -> None:
    """Ranks are ended from within autograd and from within torch's collectives, too."""

    def fails(mesh: DeviceMesh) -> None:
        x = distribute_tensor(torch.rand(1, 2, 9, 9), mesh, [Shard(2)], src_data_rank=None).requires_grad_()
        w = distribute_tensor(torch.rand(2, 2, 3, 3), mesh, [Replicate()], src_data_rank=None)
        y = F.conv2d(x, w, padding=1)
        if dist.get_rank() == 2:
            y.register_hook(lambda _: 1 / 0)
        y.sum().backward()

    with convmesh.enable(), pytest.raises(ZeroDivisionError) as caught:
        convmesh.simulate(fails, 3)
    assert any("rank 2" in note for note in caught.value.__notes__)


def test_the_person_at_the_keyboard() -> None:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background ignores it

    def runs_for_ever(mesh: DeviceMesh) -> None:
        if dist.get_rank() == 1:
            _thread.interrupt_main()
            while True:
                time.sleep(0.001)
        dist.barrier()

    try:
        with pytest.raises(KeyboardInterrupt):
            convmesh.simulate(runs_for_ever, 3)
    finally:
        signal.signal(signal.SIGINT, before)
    assert convmesh.simulate(lambda mesh: dist.get_rank(), 2) == [0, 1]


def reduces_other_sizes(mesh: DeviceMesh) -> None:
    dist.all_reduce(torch.ones(3 + (dist.get_rank() == 2)))


def calls_other_collectives(mesh: DeviceMesh) -> None:
    if dist.get_rank() == 2:
        dist.barrier()
    else:
        dist.all_reduce(torch.ones(3))


def sends_other_counts(mesh: DeviceMesh) -> None:
    counts = [1] * 4
    sent = [2, 1, 1, 1] if dist.get_rank() == 2 else counts
    dist.all_to_all_single(torch.ones(4), torch.ones(sum(sent)), counts, sent)


def returns_early(mesh: DeviceMesh) -> None:
    if dist.get_rank() != 2:
        dist.all_reduce(torch.ones(3))


def goes_by_other_groups(mesh: DeviceMesh) -> None:
    """Rank 0 waits for 2, which waits for 3, which waits for 1, which waits for 0."""
    for name in ("h", "w") if dist.get_rank() in (0, 3) else ("w", "h"):
        dist.all_reduce(torch.ones(3), group=mesh.get_group(name))


def waits_for_a_key(mesh: DeviceMesh) -> None:
    if dist.get_rank() == 2:
        dist.distributed_c10d._get_default_store().wait(["not there"])


def waits_for_a_message(mesh: DeviceMesh) -> None:
    if dist.get_rank() == 2:
        dist.recv(torch.ones(3), 1)


def catches_it(mesh: DeviceMesh) -> None:
    try:
        reduces_other_sizes(mesh)
    except Exception:
        return


MISTAKES = {
    reduces_other_sizes: r"(?s)ranks 0-1: all_reduce of \(3,\).*test_mistakes.py:.*rank 2: all_reduce of \(4,\)",
    calls_other_collectives: "(?s)not doing the same.*rank 2: barrier",
    sends_other_counts: r"(?s)not what another expects.*rank 2: .*sends \[2, 1, 1, 1\]",
    returns_early: r"(?s)ranks 0-1, 3: waits for all_reduce of .*rank 2 did not come.*rank 2: has returned",
    goes_by_other_groups: "(?s)deadlock: all ranks wait.*rank 2: waits for all_reduce",
    waits_for_a_key: "(?s)rank 2: waits for .*not there in the store, at .*test_mistakes.py",
    waits_for_a_message: r"(?s)rank 2: waits for rank 1 to send \(3,\)",
    catches_it: "not doing the same",
}


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.__name__)
def test_ranks_that_do_not_do_the_same(mistake: Any) -> None:
    with pytest.raises(convmesh.MismatchError, match=MISTAKES[mistake]):
        convmesh.simulate(mistake, (2, 2), ("h", "w"))
