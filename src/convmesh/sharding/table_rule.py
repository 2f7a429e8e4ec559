"""Rules that are only a sharding table: rows of placements, then the operator itself on local tensors.

The author of such a rule writes its rows and nothing else. What they mean for the operands and results, and for ranks
with empty shards or outside of the mesh, is the same for all operators: `table_plan`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import zip_longest
from math import prod
from typing import Any, TypeVar

from .. import _torch
from .call import Prepared
from .layout import Layout
from .plan_rule import prepared_rule
from .registry import Behaviour
from .result_strides import OneDevice, results_of
from .sharding_table import Row, Wanted, choose, counted_from_start
from .table_plan import Local, Prepare, TablePlan

AnyTable = TypeVar("AnyTable", bound=Callable[..., Iterable[Row]])


@dataclass(frozen=True)
class Like:
    """A result that should have the placements of an argument.

    Where that is replicated, the result may stay Partial, and with `or_sharded` also sharded. `decides` says whether
    the cost of redistributing the result counts when rows are chosen.
    """

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
    """Declare that `operators` run by a sharding table, and what users can expect of them.

    The decorated function gets all arguments of a call, with a `Layout` for each tensor, and yields rows: a placement
    for each tensor among the arguments, and for each result; Shard(-1) counts from the end. It raises `Unfit` for what
    it cannot run. Shapes, strides and dtypes of the results are those of one device. A rule that supports more than one
    device does gives `one_device`, which returns them for the same arguments.

    `results` gives the placements of results if they differ from those that the operator leaves. `local` makes a
    function that runs in place of the operator; if that `communicates`, it runs on every rank of the mesh, else not on
    ranks that have nothing to compute. `prepare` is for kernels that need particular strides of a local tensor. With
    `remembers`, the gradient of the first tensor is written into zeros of its shape, which get its placements.
    """

    def declare(table: AnyTable) -> AnyTable:
        def make(operator: _torch.Operator, args: tuple[Any, ...], given: list[Any]) -> Prepared:
            plan = _plan(operator, args, given, table, results, one_device)
            call = plan.call(local, prepare, communicates)
            return Prepared(operator, [given[n] for n in _torch.signature(operator).places], call, (), remembers)

        prepared_rule(*operators, behaviour=behaviour, make=make, written=table)
        return table

    return declare


def _plan(
    operator: _torch.Operator, args: tuple[Any, ...], given: Sequence[Any], table: Callable[..., Iterable[Row]],
    likes: Sequence[Like | None], one_device: Callable[..., Sequence[Layout]] | None,
) -> TablePlan:  # fmt: skip
    """Make a plan: choose a row for each mesh dimension."""
    known = _torch.signature(operator)
    named: dict[str, Layout | None] = {known.names[number]: given[number] for number in known.tensors}
    rows = list(table(*given))
    made = results_of(operator, *_torch.by_name(operator, args), one_device and partial(one_device, *given))
    inputs = [None if layout is None else layout.ndim for layout in named.values()]
    outputs = [None if one is None else len(one.shape) for one in made]
    rows = [counted_from_start(row, inputs, outputs) for row in rows]
    wishes = [_wish(named, one, like) for one, like in zip_longest(made, likes)]
    deciding = [wish if like and like.decides else None for wish, like in zip_longest(wishes, likes)]
    chosen = choose(_torch.name_of(operator), rows, list(named.items()), deciding)
    return TablePlan.of(operator, given, chosen, made, wishes)


def _wish(named: Mapping[str, Layout | None], result: OneDevice | None, like: Like | None) -> Wanted | None:
    layout = None if like is None else named[like.argument]
    if result is None or like is None or layout is None:
        return None
    return Wanted(layout.placements, prod(result.shape), like.or_sharded)
