"""How DTensor and autograd come to an operator, and what they do by themselves."""

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
from .order import after_the_last, exchanges, last_communication
from .tensors import local_of, relocate, spec_of
from .tracing import tie, tracing


def handlers() -> dict[Operator, Handler]:
    """DTensor's table of operators that are handled apart; it is consulted on every call."""
    table: dict[Operator, Any] = DTensor._op_dispatcher._custom_op_handlers
    return table


def has_strategy(operator: Operator) -> bool:
    """Whether DTensor knows by itself how an operator is sharded, without taking it apart."""
    known = DTensor._op_dispatcher.sharding_propagator
    return operator in known.op_strategy_funcs or operator in known.op_single_dim_strategy_funcs


def stock(operator: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What DTensor itself does for an operator whose rule leaves this call alone; a view stays a view."""
    dispatcher = DTensor._op_dispatcher
    info = dispatcher.unwrap_to_op_info(operator, args, kwargs)
    found = dispatcher._propagate_op_sharding_dispatch_slow_path(operator, args, kwargs, info, try_cache=True)
    if not isinstance(found, OutputSharding):
        return found  # an operator that was taken apart
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
    """Whether a view operator's results are views on this rank: what had to be moved for it is a copy."""
    if not operator._schema._is_view_op():
        return False
    if args[0].device_mesh.get_coordinate() is None:
        return True  # a rank that has nothing of it does what the others do
    first = next(iter(results), None) if isinstance(results, list | tuple) else results
    return first is None or memory_of(first) == memory_of(local_of(args[0]))


def as_view(operator: Operator, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> Any:
    """Tell torch that a view operator's result shares its memory with the operand.

    Not while a graph is traced: autograd knows it anyway, and so do the local tensors. What a graph returns as sharing
    memory with an input torch.compile makes once more, by strides and offsets, which DTensors do not have.
    """
    if not operator._schema.is_mutable:
        if tracing():
            return result
        if type(result) is DTensor and type(args[0]) is DTensor:  # nearly always
            return aliased(result, args[0])
    return return_and_correct_aliasing(operator, args, kwargs, result)


def aliased(view: DTensor, tensor: DTensor) -> DTensor:
    """The same outside of a trace."""
    torch._functionalize_unsafe_set(view, tensor)
    return view


def view_of_itself(operator: Operator, tensor: Any) -> DTensor | None:
    """A DTensor's view of all of its memory, by `detach` or `alias`; None for what needs a closer look."""
    local = tensor._local_tensor if type(tensor) is DTensor else None
    if type(local) is not torch.Tensor:
        return None
    return aliased(DTensor.__new__(DTensor, operator(local), tensor._spec, requires_grad=False), tensor)


def keeps_communication(handler: Handler) -> Handler:
    """A rule whose results depend on what it has communicated on every rank, also where a rank has nothing of them or
    has used nothing of what an exchange has brought: a compiler would drop the communication from such a rank's graph.
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
    """Make a DTensor depend on the last communication, and on the operands: a backward pass that does not depend on its
    gradients torch takes for a part of the forward pass. It keeps its memory, of which others may take notes, unless it
    is an operand's that is not to be written, or repeats numbers."""
    local = local_of(tensor)
    operands = [local_of(arg) for arg in tree_iter(args) if isinstance(arg, DTensor)]
    tied = tie(after_the_last(local), *operands)
    if written or (local.numel() and memory_of(local) not in map(memory_of, operands) and 0 not in local.stride()):
        local.copy_(tied)
    else:
        relocate(tensor, tied, spec_of(tensor))


@contextmanager
def resolving() -> Iterator[None]:
    """Let torch bring into memory what is still to be conjugated or negated, before operators that do not know of it:
    below autograd, where rules are, it does not."""
    excluded, keys = torch._C._SetExcludeDispatchKeyGuard, torch._C.DispatchKey
    with excluded(keys.Conjugate, False), excluded(keys.Negative, False):
        yield


def view_rule(handler: Handler) -> Handler:
    """A view operator's rule: in inference mode torch wants views of other tensors to be other tensors too.

    What is still to be conjugated or negated torch brings into memory for all operators but these. Where they have to
    compute, it does so for each operator that they are made of.
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
        # Outside of inference mode autograd is back, also for what a rule is made of, and it wants views that it has
        # made itself; here we are below it.
        with torch.inference_mode(False), torch._C._AutoDispatchBelowADInplaceOrView():
            return handler(operator, args, kwargs)

    return run


def in_backward() -> bool:
    """Whether autograd is running: it makes plain zeros where a gradient is missing, and writes into no gradient."""
    return bool(torch._C._current_graph_task_id() != -1)


def accumulating() -> torch.Tensor | None:
    """In a hook before a leaf's gradient is accumulated: that leaf. A hook that held it would keep it alive."""
    leaf: torch.Tensor | None = getattr(torch._C._current_autograd_node(), "variable", None)
    return leaf


def gradient_hooks(leaf: torch.Tensor) -> Collection[Callable[..., Any]]:
    """What is called after a leaf's gradient is accumulated."""
    hooks: dict[int, Callable[..., Any]] | None = leaf._post_accumulate_grad_hooks
    return hooks.values() if hooks else ()


def attach_hooks(leaf: torch.Tensor) -> None:
    """Let the hooks that a leaf lists be called again, after torch has swapped it for another tensor without them."""
    leaf._backward_hooks = leaf._backward_hooks
    leaf._post_accumulate_grad_hooks = leaf._post_accumulate_grad_hooks


def when_backward_ends(callback: Callable[[], None]) -> None:
    """Call back at the end of the backward pass that is running."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)


def replicates_implicitly() -> bool:
    """Whether DTensor's own operators take a plain tensor for one that is the same on every rank."""
    return bool(DTensor._op_dispatcher._allow_implicit_replication)


def replicate_implicitly(on: bool) -> None:
    DTensor._op_dispatcher._allow_implicit_replication = on


def has_kernel(name: str, device: str) -> bool:
    """Whether an operator has a kernel of its own for a type of device."""
    key = torch._C._dispatch_key_for_device(device)
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(name, key))
