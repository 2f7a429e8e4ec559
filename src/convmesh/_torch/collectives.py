"""Starting communications, awaiting them, and seeing them all."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from datetime import timedelta
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives as collectives
from torch.distributed.constants import default_pg_nccl_timeout, default_pg_timeout
from torch.distributed.tensor.debug._comm_mode import NATIVE_TO_PY_MAPPING

from .names import COLLECTIVES, Operator, Store
from .tracing import tie, tracing

# The operators themselves, where nothing is traced: what torch wraps around them takes longer than a small message.
_operators = torch.ops._c10d_functional

# How long a thread looks for a message before it lies down for it: to be woken takes longer than most messages do
# (measured with gloo on one machine: 1.2 ms a message asleep and 0.5 awake, 2.9 and 1.2 with two ranks a core).
AWAKE_SECONDS = 0.01
# By the memory of the result, until somebody waits for it. Nobody may, and so only the last of them are kept.
_arrivals: dict[int, dist.Work] = {}
ARRIVALS = 64


def all_to_all(
    buffer: torch.Tensor, receive_counts: Sequence[int], send_counts: Sequence[int], group: dist.ProcessGroup
) -> torch.Tensor:
    """Start sending; the result is there after `wait`. A functional collective, so that compilers can trace it."""
    if buffer.is_complex():  # not every backend knows such numbers, but all know pairs
        doubled = [2 * count for count in receive_counts], [2 * count for count in send_counts]
        return torch.view_as_complex(all_to_all(_pairs(buffer).reshape(-1), *doubled, group).view(-1, 2))
    incoming, outgoing = list(receive_counts), list(send_counts)
    if tracing():
        return _kept(collectives.all_to_all_single(_after_the_last(buffer), incoming, outgoing, group))
    result: torch.Tensor = _operators.all_to_all_single(buffer, incoming, outgoing, group.group_name)
    return result


def all_reduce(tensor: torch.Tensor, op: str, group: dist.ProcessGroup, in_place: bool = False) -> torch.Tensor:
    """Start reducing over a group; the result is there after `wait`, where `tensor` was if that may be lost."""
    if tensor.is_complex() and op in ("sum", "avg"):
        return torch.view_as_complex(all_reduce(_pairs(tensor), op, group, in_place))
    if tracing():
        return _kept(collectives.all_reduce(_after_the_last(tensor), op, group))
    run = _operators.all_reduce_ if in_place else _operators.all_reduce
    result: torch.Tensor = run(tensor, op, group.group_name)
    return result


def _pairs(tensor: torch.Tensor) -> torch.Tensor:
    """A view, as what is made complex of the result again: who waits for that waits for what is under way."""
    return torch.view_as_real(tensor.resolve_conj())


# While a graph is traced: its tracer, and the result of the last communication in it.
_last: tuple[Any, torch.Tensor] | None = None


def _tracer() -> Any:
    mode = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.PROXY)
    return None if mode is None else mode.tracer


def _after_the_last(tensor: torch.Tensor) -> torch.Tensor:
    """Make a communication depend on the one before it in the same graph.

    A compiler may reorder what does not depend on each other, by the graph, and the ranks' graphs differ.
    """
    if _last is None or _tracer() is not _last[0]:
        return tensor
    return tie(tensor, tokens=[_last[1].reshape(-1)[:1]])


def _kept(result: torch.Tensor) -> torch.Tensor:
    global _last
    tracer = _tracer()
    if tracer is None:
        _last = None
    elif result.numel():
        _last = (tracer, result)
    return result


def wait(tensor: torch.Tensor) -> torch.Tensor:
    """The result of a collective, once it is there. What a compiler traces is awaited where it starts."""
    result: torch.Tensor = tensor if tracing() else _operators.wait_tensor(tensor)
    return result


def under_way(tensor: torch.Tensor) -> torch.Tensor:
    """The result of a collective, or a view of it, for others: whoever reads it waits first."""
    return collectives.AsyncCollectiveTensor(tensor)


def arrived(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor once it is there; torch's own redistribution, too, hands on some whose collective is under way."""
    return tensor.wait() if isinstance(tensor, collectives.AsyncCollectiveTensor) else tensor


def intercept_collectives(
    around: Callable[[Operator, tuple[Any, ...], Callable[[], Any]], Any],
    awaiting: Callable[[torch.Tensor, Callable[[], Any]], Any],
) -> Callable[[], None]:
    """Let `around(operator, args, run)` run every functional collective, and `awaiting(tensor, run)` every wait for
    one; returns what undoes that.

    The place is the last one before the backend, so compiled code comes by as well, and what a compiler only traces
    is known by its device. Collectives of `torch.distributed` itself (`dist.all_reduce`) do not pass here.
    """
    library = torch.library.Library("_c10d_functional", "IMPL")
    beyond = torch._C._dispatch_keyset_full_after(torch._C.DispatchKey.BackendSelect)
    await_it = torch.ops._c10d_functional.wait_tensor.default.redispatch

    def starting(operator: Operator) -> Callable[..., Any]:
        def run(keys: Any, *args: Any, **kwargs: Any) -> Any:
            first = args[0] if isinstance(args[0], torch.Tensor) else args[0][0]
            if first.is_meta:
                return operator.redispatch(keys & beyond, *args, **kwargs)
            if first.is_cpu and operator is _operators.all_to_all_single.default:
                return around(operator, args, lambda: _all_to_all_on_cpus(*args, **kwargs))
            return around(operator, args, lambda: operator.redispatch(keys & beyond, *args, **kwargs))

        return run

    def waiting(keys: Any, tensor: torch.Tensor) -> Any:
        def run() -> Any:
            _look_for(tensor)
            return await_it(keys & beyond, tensor)

        return awaiting(tensor, run)

    for name in COLLECTIVES:
        kernel = starting(getattr(torch.ops._c10d_functional, name).default)
        library.impl(name, kernel, "BackendSelect", with_keyset=True)
    library.impl("wait_tensor", waiting, "BackendSelect", with_keyset=True)
    # torch's CommDebugMode does not know the one that reduces in place.
    NATIVE_TO_PY_MAPPING[_operators.all_reduce_] = torch.ops.c10d_functional.all_reduce

    def undo() -> None:
        NATIVE_TO_PY_MAPPING.pop(_operators.all_reduce_)
        library._destroy()

    return undo


def _all_to_all_on_cpus(
    buffer: torch.Tensor, receive_counts: list[int], send_counts: list[int], group: dist.ProcessGroup | str
) -> torch.Tensor:
    """What torch's operator does, except that whoever waits for the result can ask whether it is there."""
    result = buffer.new_empty((sum(receive_counts), *buffer.shape[1:]))
    work = group_called(group).alltoall_base(result, buffer.contiguous(), receive_counts, send_counts)
    torch._C._distributed_c10d._register_work(result, work)
    _arrivals[memory_of(result)] = work
    if len(_arrivals) > ARRIVALS:
        del _arrivals[next(iter(_arrivals))]
    return result


def _look_for(tensor: torch.Tensor) -> None:
    """Stay awake for a while until the result of a collective is there, and let others compute meanwhile."""
    work = _arrivals.pop(memory_of(tensor), None)
    if work is None or not hasattr(os, "sched_yield"):
        return
    until = perf_counter() + AWAKE_SECONDS
    while not work.is_completed() and perf_counter() < until:
        os.sched_yield()


def memory_of(tensor: torch.Tensor) -> int:
    """Tells tensors apart that look at different memory, also where there is none of it."""
    return int(tensor.untyped_storage()._cdata)


def group_called(group: dist.ProcessGroup | str) -> dist.ProcessGroup:
    """The process group that a functional collective was given, by its name or itself."""
    if isinstance(group, dist.ProcessGroup):
        return group
    found: dist.ProcessGroup = torch._C._distributed_c10d._resolve_process_group(dist.distributed_c10d.GroupName(group))
    return found


def timeout_of(group: dist.ProcessGroup) -> timedelta:
    """How long a collective of this group may take; torch's default where its backend does not say."""
    options = getattr(group._get_backend(group._device_types[0]), "options", None)
    said: timedelta | None = getattr(options, "_timeout", None)
    return default_pg_timeout if said is None else said


def inherit_timeout(group: dist.ProcessGroup) -> None:
    """Give a group that nobody set a time-out for the one that was given to `init_process_group`.

    torch makes the groups of a mesh with a time-out of its own, of half an hour.
    """
    world = dist.group.WORLD
    assert world is not None, "a group is part of an initialised world"
    wanted = timeout_of(world)
    if timeout_of(group) in (default_pg_timeout, default_pg_nccl_timeout) and timeout_of(group) != wanted:
        # Newer releases of torch have a public function for it, and warn of the private one.
        getattr(dist, "set_timeout", dist.distributed_c10d._set_pg_timeout)(wanted, group)


def store() -> Store:
    """Where all ranks can leave each other messages without a collective."""
    found: Store = dist.distributed_c10d._get_default_store()
    return found
