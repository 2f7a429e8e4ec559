"""While torch.compile traces: knowing it, and keeping the ranks' code apart and complete."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Container, Sequence
from contextlib import AbstractContextManager
from typing import Any, TypeVar
from weakref import WeakKeyDictionary, ref

import torch
import torch.distributed as dist
from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy, set_code_exec_strategy
from torch._guards import TracingContext
from torch._subclasses import FakeTensor
from torch.distributed.tensor import DTensor
from torch.fx import traceback
from torch.fx.experimental.proxy_tensor import get_proxy_mode, has_proxy_slot
from torch.utils._python_dispatch import _disable_current_modes

from .arrivals import memory_of
from .graph import nothing, of_this_pass, unseen
from .names import VERSION, Handler, Operator

AnyFunction = TypeVar("AnyFunction", bound=Callable[..., Any])


_key_is_on, _mode = torch._C._dispatch_tls_is_dispatch_key_included, torch._C._get_dispatch_mode
_PYTHON_DISPATCHER = torch._C.DispatchKey.PythonDispatcher
_FAKE, _PROXY = torch._C._TorchDispatchModeKey.FAKE, torch._C._TorchDispatchModeKey.PROXY
_before_dispatch = torch._ops.mode_stack_state_for_pre_dispatch()


def tracing() -> bool:
    """Under torch.compile, where sizes may be symbols: what torch's functional collectives ask, in half the time."""
    return bool(
        torch.compiler.is_dynamo_compiling()
        or _key_is_on(_PYTHON_DISPATCHER)
        or _mode(_FAKE) is not None
        or _mode(_PROXY) is not None
        or _before_dispatch.get(0) is not None
    )


def proxy_mode() -> Any:
    """What makes a graph of what runs, or None."""
    return _mode(_PROXY)


def compiles_call_of(modules: Container[int]) -> bool:
    """Whether what a compiler traces now is part of a call of a module, of these by their ids.

    Dynamo itself, which comes first, does not say; the backend, which traces the same once more, is told.
    """
    if not tracing():
        return False
    node = traceback.current_meta
    calls = (key.partition("@")[0] for key in node.get("nn_module_stack", ()))
    return not node or any(key.isdigit() and int(key) in modules for key in calls)


def never_alone(function: AnyFunction) -> AnyFunction:
    """Keep torch.compile from compiling a function by itself; as a part of a function that calls it, it may.

    A hook of a compiled module is either one or the other, as the module's class is torch's own or a user's.
    """
    set_code_exec_strategy(function.__code__, _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.SKIP))
    return function


_kept: WeakKeyDictionary[TracingContext, list[torch.Tensor]] = WeakKeyDictionary()


def is_traced(local: Any) -> bool:
    """Whether a graph that is traced knows this tensor; for one that it does not, it would write into a constant."""
    mode = get_proxy_mode()
    return mode is None or not isinstance(local, FakeTensor) or has_proxy_slot(local, mode.tracer)


def in_a_trace() -> bool:
    """Whether torch.compile traces, which begins and ends."""
    return TracingContext.try_get() is not None


def kept(tensor: torch.Tensor) -> ref[torch.Tensor]:
    """A reference to a compiler's tensor that holds as long as the compiler traces, and keeps nothing afterwards."""
    _kept.setdefault(TracingContext.get(), []).append(tensor)
    return ref(tensor)


def no_modes() -> AbstractContextManager[Any]:
    """For real numbers and meta tensors of one's own, also while torch.compile traces."""
    return _disable_current_modes()


_tag = ""  # what is ours of torch.compile's cache key, while it is there


def _groups() -> str:
    """A digest of all process groups: their names are written into compiled code, and programs number them anew."""
    world = dist.distributed_c10d._world
    groups = sorted((name, sorted(world.pg_group_ranks[group])) for group, name in world.pg_names.items())
    return hashlib.blake2b(repr(groups).encode(), digest_size=8).hexdigest()


def compile_for_this_rank() -> None:
    """Keep torch.compile from handing one rank the code of another rank, or of a program with other process groups.

    Its cache on disk knows a DTensor by its global layout, which all ranks share, while their code differs.
    """
    global _tag
    compile_for_any_rank()
    _tag = f"convmesh-{VERSION}-rank-{dist.get_rank()}-groups-{_groups()}"
    torch.compiler.config.cache_key_tag += _tag


def compile_for_any_rank() -> None:
    """Put back what `compile_for_this_rank` has changed."""
    global _tag
    if _tag:
        torch.compiler.config.cache_key_tag = torch.compiler.config.cache_key_tag.replace(_tag, "")
        _tag = ""


def keep_whole(operator: Operator, made_of: Handler | None = None) -> Callable[[], None]:
    """Keep torch.compile from taking an operator apart before DTensor sees it, or let `made_of` do so; returns what
    undoes that.

    Tensors of other kinds are still treated as before.
    """
    kernels = operator.py_kernels
    before = dict(kernels)

    def replacement(kernel: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            if not isinstance(args[0], DTensor):
                return kernel(*args, **kwargs)
            if made_of is not None:
                return made_of(operator, args, kwargs)
            with torch._C._DisablePythonDispatcher():
                return operator(*args, **kwargs)

        return run

    def undo() -> None:
        kernels.update(before)
        operator._dispatch_cache.clear()

    kernels.update({key: replacement(kernel) for key, kernel in before.items()})
    operator._dispatch_cache.clear()
    return undo


def tie(result: torch.Tensor, *operands: torch.Tensor, after: Sequence[torch.Tensor] = ()) -> torch.Tensor:
    """Make the compiler see that `result` depends on its operands and on exchanges, on every rank.

    It drops or moves a collective of which a rank uses nothing, and then the other ranks wait for the wrong one.
    `after` are results of exchanges.
    """
    if not tracing():
        return result
    others = [operand for operand in operands if operand is not result]
    if memory_of(result) not in map(memory_of, others):  # else it has to be one that has memory of its own
        others = unseen(result, of_this_pass(others))
    origins = [*unseen(result, after), *others]
    if not origins:
        return result
    zero = nothing(origins, result.dtype)
    return torch.logical_or(result, zero) if result.dtype == torch.bool else result + zero


def tie_in_place(result: torch.Tensor, *operands: torch.Tensor, after: Sequence[torch.Tensor] = ()) -> None:
    """The same for a tensor that keeps its memory."""
    origins = unseen(result, [*after, *of_this_pass(operands)])
    if origins:
        zero = nothing(origins, result.dtype)
        _ = result.logical_or_(zero) if result.dtype == torch.bool else result.add_(zero)
