"""The batching rules of convolution, from the call to the result: rule -> operands -> choice -> run -> wrap.

In the comments B is the mapped dimension, `*` the spatial ones; a transposed convolution has the weight [C O/g *].
Where B is in memory is up to the algorithm. `stock` is torch's own rule, which some calls are left to.

A known call of plain tensors is one look-up: between two operators that stream through megabytes, Python's own data is
evicted from the processor's caches, and a few dozen microseconds of it become a few hundred.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from ..sharding.implicit_replication import constants_allowed
from . import choice
from ._functorch import Keys, Nature, below_vmap, current_level, innermost, nature_of, plain, unwrap, wrap
from .algorithms import Task, add_bias
from .choice import Decision, choose
from .contraction import FACTORS, Contraction, Role
from .folding import Mapped, Operand
from .machines import Ranks, of_plain_tensors
from .products import backward_tasks, circumstances_of, forward_task, task_of
from .sharded import by_own_samples, expressible, without_filling

Stock = Callable[..., Any]

# For the operand whose gradient is asked for torch's rule makes a stand-in of the same size, and copies it. Calls from
# Python cost less than copying more bytes than these.
STAND_IN = 2**20


class Product(NamedTuple):
    """One of the products that a call needs, and the decision how to compute it, if already made."""

    task: Task
    decision: Decision | None
    is_left: bool = False  # to torch's own rule


# Calls of plain tensors that were seen before.
_known: dict[Hashable, tuple[Product, ...]] = {}
LONGEST = 4096


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
    x, w, b, key, level = _operands(input, weight, bias, arguments)
    if x.dim is None and w.dim is None and (b is None or b.dim is None):  # an outer level's: it passes this one
        return stock(keys, input, weight, bias, *arguments)  # type: ignore[no-any-return]
    products = _known.get(key) if key is not None else None
    if products and products[0].is_left:
        return stock(keys, input, weight, bias, *arguments)  # type: ignore[no-any-return]
    nature = Nature.PLAIN if key is not None else nature_of(*(each.value for each in (x, w, b) if each is not None))
    task = products[0].task if products else forward_task(x, w, b, arguments, circumstances_of(nature, x.value))
    first, second = map(Operand, FACTORS[task.contraction.wanted], (x, w))
    with below_vmap(nature):
        if products is None:
            decision = _decision(task, first, second, b)
            # torch's rule adds a bias afterwards wherever there is anything mapped but the input.
            by_torch = b is None or (w.dim is None and b.dim is None)
            products = _keep(key, Product(task, decision, by_torch and decision is not None and decision.as_torch))
        (product,) = products
        if not product.is_left:
            # [N C *]   [O C *]   [B O]        -> [B N O *]
            if x.dim is None and w.dim is None:
                assert b is not None
                return wrap(*add_bias(Mapped(task.contraction(x.value, w.value), None), b), level)
            # [B N C *] [O C *]   [O] or [B O] -> [B N O *]
            # [N C *]   [B O C *] [O] or [B O] -> [B N O *]
            # [B N C *] [B O C *] [O] or [B O] -> [B N O *]
            return wrap(*_contract(task, product.decision, first, second, b), level)
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
    g, x, w, key, level = _operands(grad_output, input, weight, (*arguments, *output_mask))
    assert w is not None
    products = _known.get(key) if key is not None else None
    all_left = products and [*(each.is_left for each in products), False] == [*output_mask]
    if all_left or (g.dim is None and x.dim is None and w.dim is None):
        return stock(keys, grad_output, input, weight, bias_sizes, *arguments, output_mask)  # type: ignore[no-any-return]
    taken, given = (Role.RESPONSE, Role.IMAGE) if transposed else (Role.IMAGE, Role.RESPONSE)
    from_g, from_x, from_w = Operand(given, g), Operand(taken, x), Operand(Role.KERNEL, w)
    pairs = (from_g, from_w), (from_g, from_x) if transposed else (from_x, from_g)
    nature = Nature.PLAIN if key is not None else nature_of(g.value, x.value, w.value)
    gradients: list[Tensor | None] = [None, None, None]
    with below_vmap(nature):
        if products is None:
            tasks = backward_tasks(g, x, w, arguments, circumstances_of(nature, g.value))
            made = [
                Product(task, _decision(task, *pair, None) if asked else None)
                for task, pair, asked in zip(tasks, pairs, output_mask, strict=False)
            ]
            all_mapped = g.dim is not None and x.dim is not None and w.dim is not None
            products = _keep(key, *(_left_to_torch(each, all_mapped) for each in made))
        # [B N O *] [O C *]   -> [B N C *]
        # [N O *]   [B O C *] -> [B N C *]
        # [B N O *] [B O C *] -> [B N C *]
        # and for the weight
        # [N C *]   [B N O *] -> [B O C *]
        # [B N C *] [N O *]   -> [B O C *]
        # [B N C *] [B N O *] -> [B O C *]     gradients per sample
        for i, (product, pair) in enumerate(zip(products, pairs, strict=True)):
            if output_mask[i] and not product.is_left:
                gradients[i] = wrap(*_contract(product.task, product.decision, *pair, None), level)
        # [B N O *]           -> [B O]
        if output_mask[2]:
            gradients[2] = wrap(*_sum_to_channels(g), level)
    left = [product.is_left for product in products]
    if any(left):
        theirs = stock(keys, grad_output, input, weight, None, *arguments, [*left, False])
        return tuple(
            their if asked else our for our, their, asked in zip(gradients, theirs, [*left, False], strict=True)
        )
    return tuple(gradients)


def with_indices_of_its_own(stock: Stock, keys: Keys, *args: Any) -> Any:
    """Run an operator whose batching rule creates indices; beside DTensors, these are constants."""
    if all(isinstance(innermost(each), DTensor) for each in args if isinstance(each, Tensor)):
        with constants_allowed():
            return stock(keys, *args)
    return stock(keys, *args)


def _operands(
    first: Tensor, second: Tensor, third: Tensor | None, arguments: Hashable
) -> tuple[Mapped, Mapped, Mapped | None, Hashable, int]:
    """Return the operands under the innermost vmap, the key of the call (for plain tensors), and the level."""
    level = current_level()
    a, b = Mapped(*unwrap(first, level)), Mapped(*unwrap(second, level))
    c = None if third is None else Mapped(*unwrap(third, level))
    key = None if choice.is_watched() else plain(a, b, c)
    if key is not None:
        settings = choice.settings()
        key = (key, arguments, settings.benchmark, settings.is_exact, torch.get_num_threads(), of_plain_tensors())
    return a, b, c, key, level


def _keep(key: Hashable, *products: Product) -> tuple[Product, ...]:
    if key is not None:
        if len(_known) >= LONGEST:
            _known.clear()
        _known[key] = products
    return products


choice.when_forgotten(_known.clear)


def _left_to_torch(product: Product, all_mapped: bool) -> Product:
    decision = product.decision
    is_left = decision is not None and decision.as_torch and (all_mapped or product.task.result_bytes <= STAND_IN)
    return product._replace(is_left=is_left)


def _decision(task: Task, first: Operand, second: Operand, bias: Mapped | None) -> Decision | None:
    """Return the decision for plain tensors; None if there is nothing to choose, or for other tensors."""
    if task.nature is not Nature.PLAIN or task.batch == 0 or not (first.is_mapped or second.is_mapped):
        return None
    return choose(task, first, second, bias)


def _contract(task: Task, decision: Decision | None, first: Operand, second: Operand, bias: Mapped | None) -> Mapped:
    """Compute a product with the algorithm chosen. If no operand is mapped, it is computed once."""
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
    """Compute a product of local tensors of DTensors."""
    task = task_of(contraction, batch, first, second, ranks.machine())
    if batch == 0:
        choice.attend(ranks, task)
        return _contract(task, None, first, second, bias)
    return _contract(task, choose(task, first, second, bias, ranks=ranks), first, second, bias)


def _nothing(contraction: Contraction, first: Operand, second: Operand) -> Mapped:
    """Return the result for a batch of no samples: empty, but differentiable."""
    empty = first.value.new_empty((0, *contraction.shape(contraction.wanted)))
    # Of one dimension: an outer map of no samples at all cannot multiply tensors of none.
    return Mapped(empty * first.value.sum().reshape(1) * second.value.sum().reshape(1), 0)


def _sum_to_channels(g: Mapped) -> Mapped:
    if g.dim is None:
        return Mapped(g.value.sum((0, *range(2, g.value.ndim))), None)
    return Mapped(g.in_front.sum((1, *range(3, g.value.ndim))), 0)
