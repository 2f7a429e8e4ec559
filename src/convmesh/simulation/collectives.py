"""The collectives, executed once all ranks of a group have joined, on the tensors of all of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import reduce
from typing import Any

import torch
import torch.distributed as dist

from .. import _torch

Lists = Sequence[Sequence[torch.Tensor]]

_COMBINE: dict[Any, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    dist.ReduceOp.SUM: torch.add, dist.ReduceOp.AVG: torch.add, dist.ReduceOp.PRODUCT: torch.mul,
    dist.ReduceOp.MIN: torch.minimum, dist.ReduceOp.MAX: torch.maximum, dist.ReduceOp.BAND: torch.bitwise_and,
    dist.ReduceOp.BOR: torch.bitwise_or, dist.ReduceOp.BXOR: torch.bitwise_xor,
}  # fmt: skip


@dataclass(eq=False)
class Call:
    """A collective on one rank: `what` must be the same on all ranks, and `run` gets the calls of all, in rank order.

    `gives` and `takes` are lists of its input and output tensors; how they are nested depends on the collective.
    """

    what: str
    run: Callable[[list[Call]], None]
    gives: Lists
    takes: Lists
    by_rank: bool = False
    op: Any = None
    root: int = 0

    @property
    def sends(self) -> tuple[int, ...]:
        """Number of elements for each rank, if ranks may differ in them."""
        return tuple(tensor.numel() for tensor in self.gives[0]) if self.by_rank else ()

    @property
    def receives(self) -> tuple[int, ...]:
        return tuple(tensor.numel() for tensor in self.takes[0]) if self.by_rank else ()


@contextmanager
def hidden_from_autograd(calls: Sequence[Call]) -> Iterator[None]:
    """Context manager that hides a collective from autograd, and from modes of the rank that joined last."""
    inference = any(tensor.is_inference() for call in calls for tensors in call.takes for tensor in tensors)
    with _torch.no_modes(), torch.inference_mode() if inference else torch.no_grad():
        yield


def all_reduce(calls: list[Call]) -> None:
    for number in range(len(calls[0].gives[0])):
        total = reduce_tensors([call.gives[0][number] for call in calls], calls[0].op)
        for call in calls:
            copy_into(call.takes[0][number], total)


def reduce_to_root(calls: list[Call]) -> None:
    copy_into(calls[calls[0].root].takes[0][0], reduce_tensors([call.gives[0][0] for call in calls], calls[0].op))


def broadcast(calls: list[Call]) -> None:
    root = calls[calls[0].root]
    for call in calls:
        for taken, given in zip(call.takes[0], root.gives[0], strict=True):
            copy_into(taken, given)


def all_gather(calls: list[Call]) -> None:
    """All-gather `gives[number][0]` of every rank into `takes[number]` of all ranks that have one."""
    for call in calls:
        for number, taken in enumerate(call.takes):
            for target, source in zip(taken, calls, strict=True):
                copy_into(target, source.gives[number][0])


def scatter(calls: list[Call]) -> None:
    for call, given in zip(calls, calls[calls[0].root].gives[0], strict=True):
        copy_into(call.takes[0][0], given)


def reduce_scatter(calls: list[Call]) -> None:
    """Reduce `gives[number]` over all ranks, and scatter the result into `takes[number][0]`."""
    for rank, call in enumerate(calls):
        for number, taken in enumerate(call.takes):
            copy_into(taken[0], reduce_tensors([other.gives[number][rank] for other in calls], call.op))


def all_to_all(calls: list[Call]) -> None:
    for rank, call in enumerate(calls):
        for taken, other in zip(call.takes[0], calls, strict=True):
            copy_into(taken, other.gives[0][rank])


def barrier(calls: list[Call]) -> None:
    """Do nothing: a barrier."""


def reduce_tensors(tensors: Sequence[torch.Tensor], op: Any) -> torch.Tensor:
    """Reduce tensors in rank order."""
    if op not in _COMBINE:
        raise NotImplementedError(f"a simulated process group does not reduce by {op}")
    total = reduce(_COMBINE[op], tensors)
    return total / len(tensors) if op == dist.ReduceOp.AVG else total


def copy_into(target: torch.Tensor, given: torch.Tensor) -> None:
    if target.numel() and target is not given:
        target.detach().copy_(given.reshape(target.shape))
