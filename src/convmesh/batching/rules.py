"""The batching rules of convolution: what each mapped operand does to a result.

In the comments B is the mapped dimension, `*` the spatial ones; a transposed convolution has the weight [C O/g *].
Where B ends up in memory is up to the algorithm. `stock` is torch's own rule, for what it does as well as anyone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor

from ..sharding.implicit_replication import constants_allowed
from ._functorch import Keys, Nature, below_vmap, current_level, innermost, nature_of, unwrap, wrap
from .algorithms import Task, add_bias
from .choice import Decision, attend, choose
from .contraction import FACTORS, Contraction, Role
from .folding import Mapped, Operand
from .machines import Ranks, of_plain_tensors
from .products import (
    backward_tasks,
    circumstances_of,
    forward_task,
    known_backward_tasks,
    known_forward_task,
    laid,
    task_of,
)
from .sharded import by_own_samples, expressible, without_filling
from .shortcut import is_left_to_torch, key_of, leave_to_torch

Stock = Callable[..., Any]

# For the operand whose gradient is asked for torch's rule makes a stand-in of the same size, and copies it. Calls from
# Python cost less than copying more bytes than these.
STAND_IN = 2**20


def convolution(
    stock: Stock,
    keys: Keys,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
) -> Tensor:
    """`aten.convolution` under vmap."""
    arguments = (tuple(stride), tuple(padding), tuple(dilation), transposed, tuple(output_padding), groups)
    key = key_of((input, weight, bias), arguments)
    if is_left_to_torch(key):
        return stock(keys, input, weight, bias, *arguments)  # type: ignore[no-any-return]
    level = current_level()
    x, w = Mapped(*unwrap(input, level)), Mapped(*unwrap(weight, level))
    b = None if bias is None else Mapped(*unwrap(bias, level))
    if x.dim is None and w.dim is None and (b is None or b.dim is None):  # an outer level's: it passes this one
        return stock(keys, input, weight, bias, *arguments)  # type: ignore[no-any-return]
    nature = nature_of(x.value, w.value) if b is None else nature_of(x.value, w.value, b.value)
    around = circumstances_of(nature, x.value, of_plain_tensors())
    plan = known_forward_task if nature is Nature.PLAIN else forward_task
    task = plan(laid(x), laid(w), None if b is None else laid(b), arguments, around)
    first, second = map(Operand, FACTORS[task.contraction.wanted], (x, w))
    with below_vmap(nature):
        # [N C *]   [O C *]   [B O]        -> [B N O *]
        if x.dim is None and w.dim is None:
            assert b is not None
            return wrap(*add_bias(Mapped(task.contraction(x.value, w.value), None), b), level)
        # [B N C *] [O C *]   [O] or [B O] -> [B N O *]
        # [N C *]   [B O C *] [O] or [B O] -> [B N O *]
        # [B N C *] [B O C *] [O] or [B O] -> [B N O *]
        decision = _decision(task, first, second, b)
        # torch's rule adds a bias afterwards wherever there is anything mapped but the input.
        best_by_torch = _as_torch(decision) and (b is None or (w.dim is None and b.dim is None))
        if not best_by_torch:
            return wrap(*_contract(task, decision, first, second, b), level)
    leave_to_torch(key)
    return stock(keys, input, weight, bias, *arguments)  # type: ignore[no-any-return]


def convolution_backward(
    stock: Stock,
    keys: Keys,
    grad_output: Tensor,
    input: Tensor,
    weight: Tensor,
    bias_sizes: Sequence[int] | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
    output_mask: Sequence[bool],
) -> tuple[Tensor | None, ...]:
    """`aten.convolution_backward` under vmap."""
    arguments = (tuple(stride), tuple(padding), tuple(dilation), transposed, tuple(output_padding), groups)
    key = key_of((grad_output, input, weight), arguments, tuple(output_mask))
    if is_left_to_torch(key):
        return stock(keys, grad_output, input, weight, None, *arguments, output_mask)  # type: ignore[no-any-return]
    level = current_level()
    g, x, w = Mapped(*unwrap(grad_output, level)), Mapped(*unwrap(input, level)), Mapped(*unwrap(weight, level))
    if g.dim is None and x.dim is None and w.dim is None:
        return stock(keys, grad_output, input, weight, bias_sizes, *arguments, output_mask)  # type: ignore[no-any-return]
    nature = nature_of(g.value, x.value, w.value)
    around = circumstances_of(nature, g.value, of_plain_tensors())
    plan = known_backward_tasks if nature is Nature.PLAIN else backward_tasks
    both = output_mask[0] and output_mask[1]
    tasks = plan(laid(g), laid(x), laid(w), arguments, around, both)
    all_mapped = g.dim is not None and x.dim is not None and w.dim is not None
    taken, given = (Role.RESPONSE, Role.IMAGE) if transposed else (Role.IMAGE, Role.RESPONSE)
    from_g, from_x, from_w = Operand(given, g), Operand(taken, x), Operand(Role.KERNEL, w)
    gradients: list[Tensor | None] = [None, None, None]
    left = [False, False, False]
    with below_vmap(nature):
        # [B N O *] [O C *]   -> [B N C *]
        # [N O *]   [B O C *] -> [B N C *]
        # [B N O *] [B O C *] -> [B N C *]
        # and for the weight
        # [N C *]   [B N O *] -> [B O C *]
        # [B N C *] [N O *]   -> [B O C *]
        # [B N C *] [B N O *] -> [B O C *]     gradients per sample
        pairs = (from_g, from_w), (from_g, from_x) if transposed else (from_x, from_g)
        for i, (task, (first, second)) in enumerate(zip(tasks, pairs, strict=True)):
            if output_mask[i]:
                decision = _decision(task, first, second, None)
                left[i] = _as_torch(decision) and (all_mapped or task.result_bytes <= STAND_IN)
                if not left[i]:
                    gradients[i] = wrap(*_contract(task, decision, first, second, None), level)
        # [B N O *]           -> [B O]
        if output_mask[2]:
            gradients[2] = wrap(*_sum_to_channels(g), level)
    if any(left):
        if left == list(output_mask):
            leave_to_torch(key)
        theirs = stock(keys, grad_output, input, weight, None, *arguments, left)
        return tuple(their if asked else our for our, their, asked in zip(gradients, theirs, left, strict=True))
    return tuple(gradients)


def with_indices_of_its_own(stock: Stock, keys: Keys, *args: Any) -> Any:
    """An operator whose batching rule counts samples or classes: beside DTensors alone, what it makes are constants."""
    if all(isinstance(innermost(each), DTensor) for each in args if isinstance(each, Tensor)):
        with constants_allowed():
            return stock(keys, *args)
    return stock(keys, *args)


def _decision(task: Task, first: Operand, second: Operand, bias: Mapped | None) -> Decision | None:
    """How plain tensors are multiplied, if there is anything to be chosen. Others are looked into first."""
    if task.nature is not Nature.PLAIN or task.batch == 0 or not (first.is_mapped or second.is_mapped):
        return None
    return choose(task, first, second, bias)


def _as_torch(decision: Decision | None) -> bool:
    return decision is not None and decision.as_torch


def _contract(task: Task, decision: Decision | None, first: Operand, second: Operand, bias: Mapped | None) -> Mapped:
    """By the algorithm that suits. Gradients of what is not mapped depend on no sample, and are computed once."""
    if decision is not None:
        return decision.algorithm.run(task, first, second, bias)
    if not first.is_mapped and not second.is_mapped:
        return Mapped(task.contraction(first.value, second.value), None)
    if task.nature is Nature.SHARDED:
        result = by_own_samples(task.contraction, task.batch, first, second, bias, _compute)
        if result is not None:
            return result
    if task.batch == 0:
        return _nothing(task.contraction, first, second)
    if task.nature in (Nature.SHARDED, Nature.OPAQUE):
        samples, first, second, bias = expressible(task.contraction, task.batch, first, second, bias)
        whole = task.opaque(samples, (first.is_mapped, second.is_mapped))
        return without_filling(_run(whole, first, second, bias), task.batch)
    return _run(task, first, second, bias)


def _run(task: Task, first: Operand, second: Operand, bias: Mapped | None) -> Mapped:
    return choose(task, first, second, bias).algorithm.run(task, first, second, bias)


def _compute(
    contraction: Contraction, batch: int, first: Operand, second: Operand, bias: Mapped | None, ranks: Ranks
) -> Mapped:
    """Of local parts of DTensors."""
    task = task_of(contraction, batch, first, second, ranks.machine())
    if batch == 0:
        attend(ranks)
        return _contract(task, None, first, second, bias)
    return _contract(task, choose(task, first, second, bias, ranks=ranks), first, second, bias)


def _nothing(contraction: Contraction, first: Operand, second: Operand) -> Mapped:
    """The result for no samples at all: empty, and yet a function of its operands."""
    empty = first.value.new_empty((0, *contraction.shape(contraction.wanted)))
    # Of one dimension: an outer map of no samples at all cannot multiply tensors of none.
    return Mapped(empty * first.value.sum().reshape(1) * second.value.sum().reshape(1), 0)


def _sum_to_channels(g: Mapped) -> Mapped:
    if g.dim is None:
        return Mapped(g.value.sum((0, *range(2, g.value.ndim))), None)
    return Mapped(g.in_front.sum((1, *range(3, g.value.ndim))), 0)
