"""Rules that are a table: rows of placements, and then the operator itself on local tensors.

The author of such a rule writes its rows, and nothing else. What they mean for the operands, for the results, and for a
rank that has nothing of them or is outside of the mesh, is the same for all operators: `table_plan`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial, wraps
from itertools import zip_longest
from math import prod
from typing import Any, TypeVar

import torch

from .. import _torch
from .errors import Unfit, refuse
from .gradient_placements import remember
from .layout import Layout
from .plan_cache import Table
from .redistribute import layouts_of, specs_of
from .registry import Behaviour, rule, tolerant
from .result_strides import OneDevice, results_of
from .sharding_table import Assignment, Row, Wanted, choose, counted_from_start
from .table_plan import Local, Prepare, TablePlan

AnyTable = TypeVar("AnyTable", bound=Callable[..., Iterable[Row]])


@dataclass(frozen=True)
class Like:
    """A result that should have the placements of an argument. Where that is replicated, the result may stay Partial,
    and with `or_sharded` also sharded. What it takes to move it there `decides` among rows, or not."""

    argument: str
    or_sharded: bool = False
    decides: bool = True


def table_rule(
    *operators: _torch.Operator,
    behaviour: Behaviour,
    results: Sequence[Like | None] = (),
    local: Local | None = None,
    prepare: Prepare | None = None,
    communicates: bool = False,
    remembers: bool = False,
    one_device: Callable[..., Sequence[Layout]] | None = None,
) -> Callable[[AnyTable], AnyTable]:
    """Declare that `operators` run by a sharding table, and what their users can expect.

    The decorated function gets all arguments of a call, a `Layout` for each tensor, and gives the rows: a placement for
    each tensor among the arguments, and for each result; Shard(-1) counts from the end. What it cannot run it refuses
    with `Unfit`. Shapes, strides and dtypes of the results are those of one device; where a rule takes more than the
    operator does on one device, `one_device` says from the same arguments what they would be.

    `results` says where results should go, if not where the operator leaves them. `local` makes what is called in place
    of the operator; if that `communicates`, it is called on every rank of the mesh, else not where a rank has nothing
    to compute. `prepare` is for kernels that want more of a local tensor's strides than that one device could have had
    them. With `remembers`, the gradient of the first tensor is written into zeros of its shape, and goes where it was.
    """

    def declare(table: AnyTable) -> AnyTable:
        plans = Table()
        known = plans.plans

        def make(operator: _torch.Operator, args: tuple[Any, ...], key: Sequence[Any]) -> TablePlan:
            layouts, chosen, made, wishes = _choose(operator, args, key, table, results, one_device)
            return TablePlan.of(operator, args, layouts, chosen, made, wishes, local, prepare, communicates)

        @tolerant
        @wraps(table)
        def unknown(operator: _torch.Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            args = _torch.arguments(operator, args, kwargs)
            key = _key(operator, args)
            plan = plans.look_up((operator, *key), lambda: make(operator, args, key))
            if remembers:
                remember(plan.operand().spec)
            return plan.run(args)

        @wraps(table)
        def run(operator: _torch.Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            opened = _torch.opened(_torch.arguments(operator, args, kwargs), numbers=True)
            if opened is not None:
                key, values, mesh = opened
                plan: TablePlan | None = known.get((operator, *key))
                if plan is not None and plan.ready is mesh and plan.fits(values):
                    if remembers:
                        remember(plan.operand().spec)
                    return plan.compute(values)
            return unknown(operator, args, kwargs)

        rule(*operators, behaviour=behaviour, knows_strides=True, tolerates=True)(run)
        return table

    return declare


def _key(operator: _torch.Operator, args: tuple[Any, ...]) -> list[Any]:
    """What `_torch.opened` gives, for calls that need a closer look."""
    names = _torch.signature(operator).names
    tensors = [(name, value) for name, value in zip(names, args, strict=True) if isinstance(value, torch.Tensor)]
    specs = iter(specs_of(_torch.name_of(operator), tensors))
    return [next(specs) if isinstance(value, torch.Tensor) else _torch.key_of(value) for value in args]


def _choose(
    operator: _torch.Operator, args: tuple[Any, ...], key: Sequence[Any], table: Callable[..., Iterable[Row]],
    likes: Sequence[Like | None], one_device: Callable[..., Sequence[Layout]] | None,
) -> tuple[dict[int, Layout | None], Assignment, Sequence[OneDevice | None], list[Wanted | None]]:  # fmt: skip
    """Where the tensors are, by number of the argument, the rows for them, and the results."""
    known, operation = _torch.signature(operator), _torch.name_of(operator)
    specs = [(known.names[number], key[number]) for number in known.tensors]
    layouts: dict[int, Layout | None] = dict(zip(known.tensors, layouts_of(operation, specs), strict=True))
    named = {known.names[number]: layout for number, layout in layouts.items()}
    given = [layouts.get(number, value) for number, value in enumerate(args)]
    try:
        rows = list(table(*given))
    except Unfit as unfit:
        raise refuse(operation, unfit.reason, named.items(), unfit.remedy) from None
    made = results_of(operator, *_torch.by_name(operator, args), one_device and partial(one_device, *given))
    inputs = [None if layout is None else layout.ndim for layout in layouts.values()]
    outputs = [None if one is None else len(one.shape) for one in made]
    rows = [counted_from_start(row, inputs, outputs) for row in rows]
    wishes = [_wish(named, one, like) for one, like in zip_longest(made, likes)]
    deciding = [wish if like and like.decides else None for wish, like in zip_longest(wishes, likes)]
    return layouts, choose(operation, rows, list(named.items()), deciding), made, wishes


def _wish(named: Mapping[str, Layout | None], result: OneDevice | None, like: Like | None) -> Wanted | None:
    layout = None if like is None else named[like.argument]
    if result is None or like is None or layout is None:
        return None
    return Wanted(layout.placements, prod(result.shape), like.or_sharded)
