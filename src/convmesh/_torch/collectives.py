"""Starting communications, awaiting them, and seeing them all."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives as collectives
from torch.distributed.tensor.debug._comm_mode import NATIVE_TO_PY_MAPPING

from .arrivals import all_to_all_on_cpus, look_for
from .groups import group_called, is_fake
from .names import COLLECTIVES, Operator
from .order import in_order
from .tracing import tracing

Around = Callable[[Operator, tuple[Any, ...], Callable[[], Any]], Any]
Awaiting = Callable[[torch.Tensor, Callable[[], Any]], Any]

# The operators themselves, where nothing is traced: what torch wraps around them takes longer than a small message.
_operators = torch.ops._c10d_functional
# Dtypes that every backend sends as they are. Others, which some have no name for, travel as bytes.
SENT = frozenset({
    torch.uint8, torch.int8, torch.int32, torch.int64, torch.float16, torch.bfloat16, torch.float32, torch.float64,
})  # fmt: skip
ALL_TO_ALL: Operator = _operators.all_to_all_single.default
_WAIT: Operator = _operators.wait_tensor.default
ALL_GATHER: Operator = _operators.all_gather_into_tensor.default
MOVING = (ALL_TO_ALL, ALL_GATHER)
ALL_REDUCE_IN_PLACE: Operator = _operators.all_reduce_.default
# What the operators come to before the backend, while somebody intercepts them, and who does.
_kernels: dict[Operator, Callable[..., Any]] = {}
interceptors: list[tuple[Around, Awaiting]] = []


def all_to_all(
    buffer: torch.Tensor, incoming: list[int], outgoing: list[int], group: dist.ProcessGroup
) -> torch.Tensor:
    """Start sending; the result is there after `wait`. A functional collective, so that compilers can trace it."""
    if buffer.is_complex():  # not every backend knows such numbers, but all know pairs
        doubled = [2 * count for count in incoming], [2 * count for count in outgoing]
        return torch.view_as_complex(all_to_all(_pairs(buffer).reshape(-1), *doubled, group).view(-1, 2))
    if tracing():
        return in_order(buffer, lambda buffer: collectives.all_to_all_single(buffer, incoming, outgoing, group), True)
    return _call(ALL_TO_ALL, buffer, incoming, outgoing, group.group_name)


def all_reduce(tensor: torch.Tensor, op: str, group: dist.ProcessGroup, in_place: bool = False) -> torch.Tensor:
    """Start reducing over a group; the result is there after `wait`, where `tensor` was if that may be lost."""
    if tensor.is_complex() and op in ("sum", "avg"):
        return torch.view_as_complex(all_reduce(_pairs(tensor), op, group, in_place))
    if tracing():
        return in_order(tensor, lambda tensor: collectives.all_reduce(tensor, op, group))
    run = ALL_REDUCE_IN_PLACE if in_place else _operators.all_reduce.default
    return _call(run, tensor, op, group.group_name)


def all_gather(tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Start to send what each rank has to all; the result, of all of them along dimension 0, is there after `wait`."""
    if tensor.is_complex():
        return torch.view_as_complex(all_gather(_pairs(tensor), group))
    if tracing():
        return in_order(tensor, lambda tensor: collectives.all_gather_tensor(tensor, 0, group))
    return _call(ALL_GATHER, tensor, group.size(), group.group_name)


def _call(operator: Operator, tensor: torch.Tensor, *args: Any) -> torch.Tensor:
    """A collective where nothing is traced. If nobody looks on between here and the backend, its kernel is called at
    once, which spares two ways through torch's dispatcher."""
    kernel = _kernels.get(operator)
    if kernel is None or watched(tensor):
        result: torch.Tensor = operator(tensor, *args)
    else:
        result = kernel(torch._C._dispatch_keys(tensor), tensor, *args)
    return result


def watched(tensor: torch.Tensor) -> bool:
    """Whether somebody looks on between a call here and the backend."""
    return (
        type(tensor) is not torch.Tensor
        or bool(torch._C._len_torch_dispatch_stack())
        or torch._C._functorch.maybe_current_level() is not None
        or torch._C._autograd._profiler_enabled()
    )


def _pairs(tensor: torch.Tensor) -> torch.Tensor:
    """A view, as what is made complex of the result again: who waits for that waits for what is under way."""
    return torch.view_as_real(tensor.resolve_conj())


def _as_bytes(send: Callable[[torch.Tensor], torch.Tensor], tensor: torch.Tensor) -> torch.Tensor:
    """Send what a backend may have no name for: [*] as [* bytes]."""
    arriving = send(tensor.contiguous().unsqueeze(-1).view(torch.uint8))
    return arriving.view(tensor.dtype).squeeze(-1)


def wait(tensor: torch.Tensor) -> torch.Tensor:
    """The result of a collective, once it is there. What a compiler traces is awaited where it starts."""
    return tensor if tracing() else _call(_WAIT, tensor)


def under_way(tensor: torch.Tensor) -> torch.Tensor:
    """The result of a collective, or a view of it, for others: whoever reads it waits first."""
    return collectives.AsyncCollectiveTensor(tensor)


def arrived(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor once it is there; torch's own redistribution, too, hands on some whose collective is under way."""
    return tensor.wait() if isinstance(tensor, collectives.AsyncCollectiveTensor) else tensor


def intercept_collectives(around: Around, awaiting: Awaiting) -> Callable[[], None]:
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
            if operator in MOVING and first.dtype not in SENT:
                return _as_bytes(lambda data: operator(data, *args[1:], **kwargs), first)
            if operator is ALL_TO_ALL and is_fake(group_called(args[-1])):
                return around(operator, args, lambda: first.new_zeros((sum(args[1]), *first.shape[1:])))
            if first.is_cpu and operator is ALL_TO_ALL:
                return around(operator, args, lambda: all_to_all_on_cpus(*args, **kwargs))
            return around(operator, args, lambda: operator.redispatch(keys & beyond, *args, **kwargs))

        return run

    def waiting(keys: Any, tensor: torch.Tensor) -> Any:
        def run() -> Any:
            look_for(tensor)
            return await_it(keys & beyond, tensor)

        return awaiting(tensor, run)

    for name in COLLECTIVES:
        kernel = starting(getattr(torch.ops._c10d_functional, name).default)
        library.impl(name, kernel, "BackendSelect", with_keyset=True)
        _kernels[getattr(_operators, name).default] = kernel
    library.impl("wait_tensor", waiting, "BackendSelect", with_keyset=True)
    _kernels[_WAIT] = waiting
    interceptors.append((around, awaiting))
    # torch's CommDebugMode does not know the one that reduces in place.
    NATIVE_TO_PY_MAPPING[_operators.all_reduce_] = torch.ops.c10d_functional.all_reduce

    def undo() -> None:
        _kernels.clear()
        interceptors.clear()
        NATIVE_TO_PY_MAPPING.pop(_operators.all_reduce_)
        library._destroy()

    return undo
