"""From the chosen rows of a sharding table to a call: operands to redistribute, a local call, results to wrap."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import zip_longest
from math import prod
from typing import Any

import torch

from .. import _torch
from .call import Call, Moved
from .layout import Layout
from .result_strides import OneDevice
from .sharding_table import Assignment, Wanted, input_placements, output_placements

Local = Callable[..., Callable[..., Any]]
"""Of a plan and the operator's arguments, with the layouts of tensors where they have to be: makes, once for the plan,
what is called with the same arguments, with local tensors, in place of the operator."""
Prepare = Callable[[Layout, torch.Tensor], torch.Tensor]
"""Of an operand's layout and its local tensor: the local tensor as a kernel wants it."""


def contiguous(layout: Layout, local: torch.Tensor) -> torch.Tensor:
    """For kernels that take contiguous tensors only, or complain of others."""
    return local.contiguous()


@dataclass(frozen=True)
class TablePlan:
    """Where the tensors of a call have to be, and where the results then are."""

    operator: _torch.Operator
    arguments: tuple[Any, ...]  # with the layouts of tensors
    operands: tuple[tuple[int, Layout], ...]  # those, by the number of the argument
    results: tuple[Moved | None, ...]

    @staticmethod
    def of(
        operator: _torch.Operator, given: Sequence[Any], chosen: Assignment, made: Sequence[OneDevice | None],
        wishes: Sequence[Wanted | None],
    ) -> TablePlan:  # fmt: skip
        """Of the arguments with the layouts of tensors, the chosen rows for these, and what one device returns."""
        operands = tuple(
            (number, given[number].placed(input_placements(chosen, place)))
            for place, number in enumerate(_torch.signature(operator).tensors)
            if given[number] is not None
        )
        mesh, placed = operands[0][1].mesh, dict(operands)
        results = tuple(
            one and _result(Layout(mesh, output_placements(chosen, place), *one), wish)
            for place, (one, wish) in enumerate(zip_longest(made, wishes))
        )
        arguments = tuple(placed.get(number, value) for number, value in enumerate(given))
        return TablePlan(operator, arguments, operands, results)

    def operand(self, number: int = 0) -> Layout:
        return self.operands[number][1]

    def call(self, local: Local | None, prepare: Prepare | None, communicates: bool) -> Call:
        """On local tensors `local`, or the operator itself; if that `communicates`, on every rank of the mesh."""
        run: Callable[..., Any] = _by_position(self.operator)
        if self.operand().present:
            if not communicates and self._has_nothing():
                run = self._zeros
            elif local is not None:
                run = local(self, *self.arguments)
            if prepare is not None and run != self._zeros:
                run = _prepared(run, prepare, self.operands)
        results = self.results[0] if _torch.gives_one_tensor(self.operator) else self.results
        return Call([self.arguments[number] for number in _torch.signature(self.operator).places], results, run)  # type: ignore[arg-type]

    def _has_nothing(self) -> bool:
        """Whether this rank has nothing of an operand of which others have something, or of the results. Some kernels
        refuse empty tensors."""
        return any(prod(layout.shape) and not prod(layout.local_shape) for _, layout in self.operands) or not any(
            one is not None and prod(one.computed.local_shape) for one in self.results
        )

    def _zeros(self, *values: Any) -> Any:
        like = values[self.operands[0][0]]
        made = [one and like.new_zeros(one.computed.local_shape, dtype=one.computed.dtype) for one in self.results]
        return made[0] if _torch.gives_one_tensor(self.operator) else made


def _result(computed: Layout, wish: Wanted | None) -> Moved:
    at = computed.placements if wish is None else [wish.becomes(*entry) for entry in enumerate(computed.placements)]
    return Moved(computed, computed.placed(at))


def _by_position(operator: _torch.Operator) -> Callable[..., Any]:
    """The operator, to be called with all arguments in the order of its schema."""
    known = _torch.signature(operator)
    return operator if known.by_name == len(known.names) else lambda *values: _torch.call(operator, values)


def _prepared(run: Callable[..., Any], prepare: Prepare, operands: Sequence[tuple[int, Layout]]) -> Callable[..., Any]:
    steps = [(number, partial(prepare, layout)) for number, layout in operands]

    def prepared(*given: Any) -> Any:
        values = list(given)
        for number, step in steps:
            values[number] = step(values[number])
        return run(*values)

    return prepared
