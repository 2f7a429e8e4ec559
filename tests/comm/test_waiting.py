"""Messages by gloo, which ranks of several machines send: that come at once, late, or that nobody waits for."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.distributed.device_mesh import DeviceMesh

import convmesh
from convmesh import _torch
from convmesh._torch import arrivals
from convmesh.comm.failures import interception
from convmesh.comm.shared_memory import mailbox
from tests.harness import Pool


@contextmanager
def by_gloo(mesh: DeviceMesh) -> Iterator[None]:
    group = mesh.get_group()
    mailbox.mailbox_of(group)
    before, mailbox._mailboxes[group] = mailbox._mailboxes[group], None
    try:
        with convmesh.enable():
            yield
    finally:
        mailbox._mailboxes[group] = before


def send(mesh: DeviceMesh) -> torch.Tensor:
    numbers = torch.full((mesh.size(),), float(mesh.get_local_rank()))
    return _torch.all_to_all(numbers, [1] * mesh.size(), [1] * mesh.size(), mesh.get_group())


def late_and_early(mesh: DeviceMesh) -> None:
    expected = torch.arange(float(mesh.size()))
    with by_gloo(mesh):
        for late in (0.0, 3 * arrivals.AWAKE_SECONDS):
            if mesh.get_local_rank() == 1:
                time.sleep(late)
            under_way = send(mesh)
            assert torch.equal(_torch.wait(under_way.view(-1, 1)).flatten(), expected)
            assert _torch.memory_of(under_way) not in arrivals._arrivals


def test_a_message_is_awaited_until_it_is_there(pool: Pool) -> None:
    pool.run(late_and_early, mesh=(2,))


def unawaited(mesh: DeviceMesh) -> int:
    with by_gloo(mesh):
        for _ in range(2 * arrivals.ARRIVALS):
            send(mesh)
        _torch.wait(send(mesh))
    return len(arrivals._arrivals)


def test_of_messages_that_nobody_waits_for_only_the_last_are_kept(pool: Pool) -> None:
    assert all(kept <= arrivals.ARRIVALS for kept in pool.run(unawaited, mesh=(2,)))


def policies(mesh: DeviceMesh) -> list[int]:
    interception._known.discard(mesh.get_group())  # as before its first message
    with by_gloo(mesh):
        _torch.wait(send(mesh))
    return [os.sched_getscheduler(thread) for thread in _torch.listeners()]


def test_threads_that_listen_for_messages_interrupt_nobody(pool: Pool) -> None:
    wanted = {os.SCHED_BATCH} if hasattr(os, "SCHED_BATCH") else set()  # only Linux has it, and shows threads
    for rank in pool.run(policies, mesh=(2,)):
        assert set(rank) == wanted
