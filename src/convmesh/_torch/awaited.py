"""Collectives that are awaited where they start.

Where nothing is traced and nobody looks on, the backend is asked at once: what torch has on the way there takes longer
than a small message. Whoever intercepts collectives sees these, too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from .arrivals import stay_awake
from .collectives import (
    ALL_GATHER,
    ALL_REDUCE_IN_PLACE,
    ALL_TO_ALL,
    SENT,
    all_gather,
    all_reduce,
    all_to_all,
    interceptors,
    wait,
    watched,
)
from .groups import is_fake
from .names import Operator
from .tracing import tracing

Begun = tuple[torch.Tensor, dist.Work | None]


def exchange(buffer: torch.Tensor, incoming: list[int], outgoing: list[int], group: dist.ProcessGroup) -> torch.Tensor:
    """`all_to_all` and `wait`."""
    if _is_plain(buffer):
        return _at_once(ALL_TO_ALL, _begin_exchange, buffer, incoming, outgoing, group)
    return wait(all_to_all(buffer, incoming, outgoing, group))


def sum_up(tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """`all_reduce`, where the tensor was if that may be, and `wait`."""
    if _is_plain(tensor) and tensor.is_contiguous():
        return _at_once(ALL_REDUCE_IN_PLACE, _begin_sum, tensor, "sum", group)
    return wait(all_reduce(tensor, "sum", group, in_place=True))


def gather(tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """`all_gather` and `wait`."""
    if _is_plain(tensor):
        return _at_once(ALL_GATHER, _begin_gather, tensor, group.size(), group)
    return wait(all_gather(tensor, group))


def _is_plain(tensor: torch.Tensor) -> bool:
    """Whether a tensor can be given to the backend as it is, without torch's dispatcher in between."""
    # Whoever looks on also sees a tensor of a class of its own, so that this comes first.
    return (
        not watched(tensor)
        and bool(interceptors)
        and tensor.dtype in SENT
        and not (tensor.is_meta or tensor.is_neg() or tracing())
    )


def _at_once(operator: Operator, begin: Callable[..., Begun], tensor: torch.Tensor, *args: Any) -> torch.Tensor:
    """A collective of a group as the last argument, started and awaited."""
    around, awaiting = interceptors[-1]
    work: dist.Work | None = None

    def run() -> torch.Tensor:
        nonlocal work
        result, work = begin(tensor, *args)
        return result

    def arrive() -> None:
        if work is not None:
            if operator is ALL_TO_ALL and tensor.is_cpu:
                stay_awake(work)
            work.wait()

    result: torch.Tensor = around(operator, (tensor, *args), run)
    awaiting(result, arrive)
    return result


def _begin_exchange(buffer: torch.Tensor, incoming: list[int], outgoing: list[int], group: dist.ProcessGroup) -> Begun:
    shape = (sum(incoming), *buffer.shape[1:])
    if is_fake(group):  # it sends nothing, leaves the result as memory happens to be, and is never done
        return buffer.new_zeros(shape), None
    result = buffer.new_empty(shape)
    return result, group.alltoall_base(result, buffer.contiguous(), incoming, outgoing)


def _begin_sum(tensor: torch.Tensor, op: str, group: dist.ProcessGroup) -> Begun:
    return tensor, group.allreduce([tensor])


def _begin_gather(tensor: torch.Tensor, ranks: int, group: dist.ProcessGroup) -> Begun:
    result = tensor.new_empty((ranks * tensor.shape[0], *tensor.shape[1:]))
    return result, group._allgather_base(result, tensor.contiguous())
