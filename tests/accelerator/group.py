"""The process group of the device `acc`, as strict as NCCL's.

A communicator runs one communication after the other in a thread of its own. Results are not there before somebody
waits, and say so: they are NaN. Who writes to what is being sent, or to what is to come, finds an error when it waits;
so do all ranks of a communicator that do not call the same collectives in the same order. CPU tensors, strided ones,
and what NCCL has no type or reduction for are refused.
"""

from __future__ import annotations

import io
import os
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from math import inf
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from convmesh.sharding.debug.rendezvous import Fingerprint, disagreement
from convmesh.simulation.collectives import Call
from convmesh.simulation.group import Group as SimulatedGroup
from tests.accelerator import BACKEND, DEVICE
from tests.accelerator.device import host_alias

FLOAT8 = {torch.float8_e4m3fn, torch.float8_e5m2}
DTYPES = FLOAT8 | {
    torch.int8, torch.uint8, torch.bool, torch.int32, torch.int64,
    torch.float16, torch.bfloat16, torch.float32, torch.float64,
}  # fmt: skip
REDUCTIONS = {dist.ReduceOp.SUM, dist.ReduceOp.AVG, dist.ReduceOp.PRODUCT, dist.ReduceOp.MIN, dist.ReduceOp.MAX}
POISON = 0xFF  # NaN

Tensors = list[torch.Tensor]
Begun = dict[str, tuple[tuple[int, ...], int]]
_Work: Any = dist.Work
# The ranks of this process' communicators, and how many communications it has begun on each.
_begun: Begun = {}


class Work(_Work):  # type: ignore[misc]
    """A communication under way: where its results go to, and what it sends, as that was when it began."""

    def __init__(self, running: Future[Tensors], takes: Tensors, gives: Tensors, given: Tensors):
        super().__init__()
        self._running, self._takes, self._sent = running, takes, list(zip(gives, given, strict=True))

    def wait(self, timeout: Any = None) -> bool:
        results = self._running.result()
        for tensor, given in self._sent:
            if not torch.equal(_bytes(host_alias(tensor)), _bytes(given)):
                raise RuntimeError(f"{tuple(tensor.shape)} {tensor.dtype} was written to while it was being sent")
        for tensor, result in zip(self._takes, results, strict=True):
            target = host_alias(tensor)
            if not (_bytes(target) == POISON).all():
                raise RuntimeError(f"{tuple(tensor.shape)} {tensor.dtype} was written to before it had come")
            target.copy_(result.view(target.shape))
        self._sent, self._takes = [], []
        self._running = Future()
        self._running.set_result([])
        return True

    def is_completed(self) -> bool:
        return self._running.done()

    is_success = is_completed

    def exception(self) -> None:
        return None

    def get_future(self) -> torch.futures.Future[Any]:
        takes = self._takes
        self.wait()
        future: torch.futures.Future[Any] = torch.futures.Future()
        future.set_result(takes)
        return future


class Group(SimulatedGroup):
    """The methods that PyTorch calls are those of a simulated group; what they ask for is sent by gloo."""

    messages_between: Any = None

    def __init__(self, store: Any, rank: int, size: int, timeout: timedelta):
        dist.ProcessGroup.__init__(self, rank, size)
        self._rank, self._size = rank, size
        self._name = self._desc = ""
        self.options = SimpleNamespace(_timeout=timeout)
        self._gloo = dist.ProcessGroupGloo(store, rank, size, timeout)
        self._communicator = ThreadPoolExecutor(1)

    def getBackendName(self) -> str:  # noqa: N802 - PyTorch's name
        return BACKEND

    @property
    def _device_types(self) -> list[torch.device]:
        """Objects travel on the device, too."""
        return [torch.device(DEVICE)]

    def _meet(self, call: Call) -> Any:
        takes = _flat(call.takes)
        gives = _flat(call.gives)
        for tensor in (*gives, *takes):
            _refuse(tensor, call.op)
        if len({tensor.dtype for tensor in (*gives, *takes)}) > 1:
            raise TypeError("Tensors must have identical type")
        given = [[host_alias(tensor).clone() for tensor in tensors] for tensors in call.gives]
        coming = [[torch.empty_like(host_alias(tensor)) for tensor in tensors] for tensors in call.takes]
        for tensor in takes:
            _bytes(host_alias(tensor)).fill_(POISON)
        running = self._communicator.submit(self._run, replace(call, gives=given, takes=coming), self._begin())
        in_place = {tensor.data_ptr() for tensor in takes}
        sent = [pair for pair in zip(gives, _flat(given), strict=True) if pair[0].data_ptr() not in in_place]
        return Work(running, takes, [tensor for tensor, _ in sent], [copy for _, copy in sent])

    def _begin(self) -> Begun:
        """Count a communication; returns what this rank has begun before it."""
        before = dict(_begun)
        ranks, count = before.get(self._name, (tuple(dist.get_process_group_ranks(self)), 0))
        _begun[self._name] = ranks, count + 1
        return before

    def barrier(self, opts: Any = None) -> Any:
        torch.ops.acc.note("barrier")
        return super().barrier(opts)

    def _message(self, tensors: Tensors, source: int | None, to: int, tag: int) -> Any:
        if source is None:
            raise RuntimeError("NCCL cannot receive from any source")
        (tensor,) = tensors
        _refuse(tensor, None)
        buffer = host_alias(tensor).clone()
        sends = to != self._rank
        if not sends:
            _bytes(host_alias(tensor)).fill_(POISON)

        def run() -> Tensors:
            data = [_bytes(buffer)]
            (self._gloo.send(data, to, 0) if sends else self._gloo.recv(data, source, 0)).wait()
            return [] if sends else [buffer]

        running = self._communicator.submit(run)
        return Work(running, [], [tensor], [buffer.clone()]) if sends else Work(running, [tensor], [], [])

    def _run(self, call: Call, before: Begun) -> Tensors:
        """In the communicator's thread: every rank gets to know what all ranks give, and have begun before."""
        told = self._all_gather((replace(call, run=_unsaid), before, dist.get_rank()))
        for _, others, other in told:
            _check_order(call.what, before, others, other)
        calls: list[Call] = [replace(said, run=call.run) for said, _, _ in told]
        prints = [Fingerprint(one.what, (), one.sends, one.receives, "") for one in calls]
        if why := disagreement(prints):
            raise RuntimeError(
                f"the ranks of a communicator do not call the same: {why}: {'; '.join(map(str, prints))}"
            )
        calls[self._rank] = call
        with torch.no_grad():
            call.run([_as_nccl_reduces(one) for one in calls])
        return _flat(call.takes)

    def _all_gather(self, said: Any) -> list[Any]:
        file = io.BytesIO()
        torch.save(said, file)
        mine = torch.frombuffer(bytearray(file.getvalue()), dtype=torch.uint8)
        lengths = self._gathered(torch.tensor([len(mine)]))
        padded = torch.zeros(int(max(lengths)), dtype=torch.uint8)
        padded[: len(mine)] = mine
        everybody = zip(self._gathered(padded), lengths, strict=True)
        return [torch.load(io.BytesIO(text[: int(n)].numpy().tobytes()), weights_only=False) for text, n in everybody]

    def _gathered(self, tensor: torch.Tensor) -> Tensors:
        parts = [torch.empty_like(tensor) for _ in range(self._size)]
        self._gloo.allgather([parts], [tensor]).wait()
        return parts


def register() -> None:
    # torch 2.15 records the collectives of groups by a name that is not kept in Python.
    os.environ["TORCH_FR_BUFFER_SIZE"] = "0"
    dist.Backend.register_backend(BACKEND, Group, devices=[DEVICE])


def _unsaid(calls: list[Call]) -> None:
    """In place of a function that every rank has."""


def _check_order(what: str, mine: Begun, others: Begun, other: int) -> None:
    """Of the communicators that this rank and another one are both part of."""
    for name in mine.keys() | others.keys():
        ranks = (mine.get(name) or others[name])[0]
        counts = [begun.get(name, (ranks, 0))[1] for begun in (mine, others)]
        if {dist.get_rank(), other} <= set(ranks) and counts[0] != counts[1]:
            raise RuntimeError(
                f"{what}: before it rank {dist.get_rank()} has begun {counts[0]} communications among ranks {ranks}, "
                f"and rank {other} {counts[1]}: ranks use their communicators in the same order, or NCCL may hang"
            )


def _flat(lists: Iterable[Sequence[torch.Tensor]]) -> Tensors:
    return [tensor for tensors in lists for tensor in tensors]


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(-1).view(torch.uint8)


def _refuse(tensor: torch.Tensor, op: Any) -> None:
    if tensor.device.type != DEVICE:
        raise RuntimeError(f"No backend type associated with device type {tensor.device.type}")
    if not tensor.is_contiguous():
        raise ValueError("Tensors must be contiguous")
    # Sums of complex numbers are sums of pairs of real ones.
    pairs = tensor.is_complex() and op in (dist.ReduceOp.SUM, dist.ReduceOp.AVG)
    if tensor.dtype not in DTYPES and not pairs:
        raise TypeError(f"Input tensor data type is not supported for NCCL process group: {tensor.dtype}")
    if op is None:
        return
    if op not in REDUCTIONS:
        raise ValueError(f"Cannot use ReduceOp.{op.name} with NCCL")
    if tensor.dtype in FLOAT8 or (tensor.dtype == torch.bool and op == dist.ReduceOp.AVG):
        raise TypeError(f"{tensor.dtype} is not supported for NCCL reductions by {op.name}")


def _as_nccl_reduces(call: Call) -> Call:
    """A sum of bools is whether any is true, and of a NaN and a number the number is the greater, and the smaller."""
    extreme = {dist.ReduceOp.MAX: -inf, dist.ReduceOp.MIN: inf}.get(call.op)
    if call.op is None:
        return call
    if call.gives[0][0].dtype == torch.bool and call.op == dist.ReduceOp.SUM:
        return replace(call, op=dist.ReduceOp.MAX)
    if extreme is None:
        return call
    return replace(call, gives=[[tensor.nan_to_num(extreme, inf, -inf) for tensor in one] for one in call.gives])
