"""The laws of the stand-in for NCCL."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from tests.accelerator.device import take_events
from tests.accelerator.ranks import results


def tensor(*values: float, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.tensor(values).to("acc", dtype)


def collectives_are_right(mesh: DeviceMesh) -> None:
    rank = dist.get_rank()
    total = tensor(1, 10 * rank)
    dist.all_reduce(total)
    assert total.tolist() == [2, 10]
    parts = [torch.empty(1, device="acc") for _ in range(2)]
    dist.all_gather(parts, tensor(rank))
    assert [part.item() for part in parts] == [0, 1]
    into = torch.empty(3, device="acc")
    dist.all_to_all_single(into, tensor(*[rank] * 3), [1 + rank, 2 - rank], [1 + rank, 2 - rank])
    assert into.tolist() == [0] * (1 + rank) + [1] * (2 - rank)
    share = torch.empty(1, device="acc")
    dist.reduce_scatter(share, [tensor(rank), tensor(2)])
    assert share.item() == (1, 4)[rank]
    source = tensor(rank + 5)
    dist.broadcast(source, 1)
    assert source.item() == 6


def results_come_when_waited_for(mesh: DeviceMesh) -> None:
    total = tensor(1)
    take_events()
    work = dist.all_reduce(total, async_op=True)
    assert total.isnan().all()
    work.wait()
    assert total.tolist() == [2]
    assert "barrier" not in take_events()


def writing_too_early_is_found(mesh: DeviceMesh) -> None:
    sent, into = tensor(1, 2), torch.empty(2, device="acc")
    work = dist.all_to_all_single(into, sent, async_op=True)
    sent.add_(1)
    with pytest.raises(RuntimeError, match="while it was being sent"):
        work.wait()
    work = dist.all_to_all_single(into, sent, async_op=True)
    into.zero_()
    with pytest.raises(RuntimeError, match="before it had come"):
        work.wait()


def what_nccl_lacks_is_refused(mesh: DeviceMesh) -> None:
    refused: list[tuple[torch.Tensor, Any, str]] = [
        (tensor(1, dtype=torch.int16), dist.ReduceOp.SUM, "int16"),
        (tensor(1, dtype=torch.bool), dist.ReduceOp.AVG, "bool"),
        (tensor(1, dtype=torch.int32), dist.ReduceOp.BOR, "BOR"),
        (tensor(1, dtype=torch.float8_e5m2), dist.ReduceOp.SUM, "float8"),
        (tensor(1, dtype=torch.complex64), dist.ReduceOp.MAX, "complex"),
        (torch.ones(2, 2, device="acc").t()[:1].t(), dist.ReduceOp.SUM, "contiguous"),
        (torch.ones(1), dist.ReduceOp.SUM, "device type cpu"),
    ]
    for given, op, why in refused:
        with pytest.raises((RuntimeError, TypeError, ValueError), match=why):
            dist.all_reduce(given, op)
    with pytest.raises(TypeError, match="int16"):
        dist.broadcast(tensor(1, dtype=torch.int16), 0)
    with pytest.raises(RuntimeError, match="any source"):
        dist.recv(tensor(1))
    mixed = [tensor(1), tensor(1, dtype=torch.float64)]
    with pytest.raises(TypeError, match="identical type"):
        torch.ops._c10d_functional.all_reduce_coalesced(mixed, "sum", mesh.get_group().group_name)


def order_is_the_same_on_all_ranks(mesh: DeviceMesh) -> None:
    work = dist.broadcast(tensor(1), 0, async_op=True) if dist.get_rank() else dist.all_reduce(tensor(1), async_op=True)
    with pytest.raises(RuntimeError, match="do not call the same"):
        work.wait()


def order_of_communicators_is_the_same_on_all_ranks(mesh: DeviceMesh) -> None:
    groups = [dist.new_group([0, 1]) for _ in range(2)]
    in_order = groups if dist.get_rank() else groups[::-1]
    works = [dist.all_reduce(tensor(1), group=group, async_op=True) for group in in_order]
    for work in works:  # both, or else a rank may end before the other has heard of it
        with pytest.raises(RuntimeError, match="in the same order, or NCCL may hang"):
            work.wait()


def what_is_sent_may_be_let_go(mesh: DeviceMesh) -> None:
    """As NCCL's groups keep the memory of a communication until it is waited for."""
    into = torch.empty(2, device="acc")
    work = dist.all_to_all_single(into, tensor(3, 4), async_op=True)
    others = [torch.ones(2, device="acc") for _ in range(100)]
    work.wait()
    assert into.tolist() == [[3, 3], [4, 4]][dist.get_rank()], len(others)


def objects_travel_on_the_device(mesh: DeviceMesh) -> None:
    said: list[Any] = [None, None]
    dist.all_gather_object(said, {"rank": dist.get_rank()})
    assert said == [{"rank": 0}, {"rank": 1}]
    told = [f"of {dist.get_rank()}"]
    dist.broadcast_object_list(told, 1)
    assert told == ["of 1"]


def nothing_may_be_sent_to_some(mesh: DeviceMesh) -> None:
    for sends in ([0, 3], [0, 0]):
        receives = [sends[dist.get_rank()]] * 2
        sent, into = torch.ones(sum(sends), device="acc"), torch.empty(sum(receives), device="acc")
        dist.all_to_all_single(into, sent, receives, sends)
        assert into.tolist() == [1] * sum(receives)


LAWS = (
    collectives_are_right, results_come_when_waited_for, writing_too_early_is_found, what_nccl_lacks_is_refused,
    what_is_sent_may_be_let_go, objects_travel_on_the_device, nothing_may_be_sent_to_some,
    order_is_the_same_on_all_ranks, order_of_communicators_is_the_same_on_all_ranks,
)  # fmt: skip


def check_laws(mesh: DeviceMesh) -> None:
    for law in LAWS:
        law(mesh)


def test_laws() -> None:
    results(check_laws, mesh=(2,))
