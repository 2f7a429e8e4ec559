"""How operators reach DTensor and autograd, and their own behaviour there."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._op_schema import OutputSharding
from torch.utils._python_dispatch import return_and_correct_aliasing
from torch.utils._pytree import tree_iter

from .arrivals import memory_of
from .names import Handler, Operator
from .operators import signature
from .order import after_the_last, exchanges, keep_after_the_last, last_communication
from .tensors import local_of, relocate, spec_of
from .tracing import tie, tracing


def handlers() -> dict[Operator, Handler]:
    """Return DTensor's table of custom handlers, which is consulted on every call."""
    table: dict[Operator, Any] = DTensor._op_dispatcher._custom_op_handlers
    return table


def has_strategy(operator: Operator) -> bool:
    """Whether DTensor has a sharding strategy for an operator, without decomposing it."""
    known = DTensor._op_dispatcher.sharding_propagator
    return operator in known.op_strategy_funcs or operator in known.op_single_dim_strategy_funcs


def stock(operator: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run DTensor's own implementation, for a call that the operator's rule leaves to it; a view stays a view."""
    dispatcher = DTensor._op_dispatcher
    info = dispatcher.unwrap_to_op_info(operator, args, kwargs)
    found = dispatcher._propagate_op_sharding_dispatch_slow_path(operator, args, kwargs, info, try_cache=True)
    if not isinstance(found, OutputSharding):
        return found  # a decomposed operator
    info.output_sharding = found
    results = dispatcher._dispatch_get_local_results_slow_path(operator, args, info)
    if operator._schema.is_mutable:
        out = signature(operator).has_out
        return dispatcher._dispatch_fast_path_python_tail(
            operator, args, kwargs, info.compute_mesh, found, results, True, not out, out
        )
    result = dispatcher.wrap(results, found.output_spec)
    return as_view(operator, args, kwargs, result) if _is_view(operator, args, results) else result


def _is_view(operator: Operator, args: tuple[Any, ...], results: Any) -> bool:
    """Whether a view operator's results are views on this rank; they are copies if DTensor moved the operand."""
    if not operator._schema._is_view_op():
        return False
    if args[0].device_mesh.get_coordinate() is None:
        return True  # a rank without a local tensor does what the others do
    first = next(iter(results), None) if isinstance(results, list | tuple) else results
    return first is None or memory_of(first) == memory_of(local_of(args[0]))


def as_view(operator: Operator, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> Any:
    """Tell torch that a view operator's result shares its storage with the operand.

    Not while tracing: autograd and the local tensors know it anyway. If a graph returned a tensor that shares storage
    with an input, torch.compile would recreate it from strides and offsets, which DTensors do not have.
    """
    if not operator._schema.is_mutable:
        if tracing():
            return result
        if type(result) is DTensor and type(args[0]) is DTensor:  # the usual case
            return aliased(result, args[0])
    return return_and_correct_aliasing(operator, args, kwargs, result)


def aliased(view: DTensor, tensor: DTensor) -> DTensor:
    """Return `view`, marked as a view of `tensor`; `as_view` outside of a trace."""
    torch._functionalize_unsafe_set(view, tensor)
    return view


def view_of_itself(operator: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> DTensor | None:
    """Return a DTensor's view by `detach` or `alias`; None for a call that needs the slow path.

    It has to be fast: autograd detaches results when it saves them, and again when it uses them.
    """
    tensor = args[0]
    local = tensor._local_tensor if type(tensor) is DTensor else None
    if type(local) is not torch.Tensor or torch.is_inference_mode_enabled():
        return None
    seen = local.detach() if operator is torch.ops.aten.detach.default else operator(local)
    view: DTensor = DTensor.__new__(DTensor, seen, tensor._spec, requires_grad=False)
    torch._functionalize_unsafe_set(view, tensor)
    return view


def keeps_communication(handler: Handler) -> Handler:
    """Wrap a rule so that its results depend on its communication, on every rank.

    A rank may have empty results, or use nothing of what it received; a compiler would drop the communication from its
    graph.
    """

    @wraps(handler)
    def run(operator: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        before, exchanged = last_communication(), exchanges()
        result = handler(operator, args, kwargs)
        if last_communication() is before:
            return result
        exchanged = exchanges() - exchanged
        for tensor in tree_iter(result):
            if isinstance(tensor, DTensor) and (exchanged or not local_of(tensor).numel()):
                _depend(tensor, operator._schema.is_mutable, args)
        return result

    return run


def _depend(tensor: DTensor, written: bool, args: tuple[Any, ...]) -> None:
    """Make a DTensor depend on the last communication, and on the operands.

    torch takes a backward pass that does not depend on its gradients for a part of the forward pass. The tensor keeps
    its storage, which may have notes, unless that belongs to an operand that must not be written, or is expanded.
    """
    local = local_of(tensor)
    operands = [local_of(arg) for arg in tree_iter(args) if isinstance(arg, DTensor)]
    if written or (local.numel() and memory_of(local) not in map(memory_of, operands) and 0 not in local.stride()):
        keep_after_the_last(local, *operands)
    else:
        relocate(tensor, tie(after_the_last(local), *operands), spec_of(tensor))


@contextmanager
def resolving() -> Iterator[None]:
    """Let torch resolve lazy conjugates and negatives before operators, which it does not do below autograd."""
    excluded, keys = torch._C._SetExcludeDispatchKeyGuard, torch._C.DispatchKey
    with excluded(keys.Conjugate, False), excluded(keys.Negative, False):
        yield


def view_rule(handler: Handler) -> Handler:
    """Wrap a view operator's rule: lazy conjugation and negation, and inference mode.

    torch resolves lazy conjugates and negatives for all operators but views. Where a view computes, it resolves
    them for each operator that it is made of. In inference mode, views of non-inference tensors must be such tensors.
    """

    @wraps(handler)
    def run(operator: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        first = args[0]
        if first.is_conj() or first.is_neg():
            with resolving():
                return viewing(operator, args, kwargs)
        if not torch.is_inference_mode_enabled() or first.is_inference():
            return handler(operator, args, kwargs)  # nearly always
        return viewing(operator, args, kwargs)

    def viewing(operator: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not torch.is_inference_mode_enabled() or args[0].is_inference():
            return handler(operator, args, kwargs)
        # Outside of inference mode autograd is active again, also for the operators that a rule calls, and requires
        # that it makes the views itself; here we run below it.
        with torch.inference_mode(False), torch._C._AutoDispatchBelowADInplaceOrView():
            return handler(operator, args, kwargs)

    return run


def in_backward() -> bool:
    """Whether a backward pass is running: autograd makes plain zeros for missing gradients, and writes into none."""
    return bool(torch._C._current_graph_task_id() != -1)


def accumulating() -> torch.Tensor | None:
    """Return the leaf whose gradient is about to be accumulated, in a hook: a hook that held it would keep it alive."""
    leaf: torch.Tensor | None = getattr(torch._C._current_autograd_node(), "variable", None)
    return leaf


def gradient_hooks(leaf: torch.Tensor) -> Collection[Callable[..., Any]]:
    """Return the hooks that are called after a leaf's gradient is accumulated."""
    hooks: dict[int, Callable[..., Any]] | None = leaf._post_accumulate_grad_hooks
    return hooks.values() if hooks else ()


def attach_hooks(leaf: torch.Tensor, listed_by: torch.Tensor) -> None:
    """Register the hooks that another leaf lists, or this one itself, if torch has swapped it for a tensor without."""
    leaf._backward_hooks = listed_by._backward_hooks
    leaf._post_accumulate_grad_hooks = listed_by._post_accumulate_grad_hooks


def when_backward_ends(callback: Callable[[], None]) -> None:
    """Call `callback` at the end of the running backward pass."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)


def replicates_implicitly() -> bool:
    """Whether DTensor's own operators take plain tensors as replicated."""
    return bool(DTensor._op_dispatcher._allow_implicit_replication)


def replicate_implicitly(on: bool) -> None:
    DTensor._op_dispatcher._allow_implicit_replication = on


def has_kernel(name: str, device: str) -> bool:
    """Whether an operator has a kernel for a device type."""
    key = torch._C._dispatch_key_for_device(device)
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(name, key))
