"""From the chosen rows of a sharding table to a `Call`: operands to redistribute, a local call, results to wrap."""

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
"""Takes (plan, *arguments), with target layouts in place of tensors, and returns the function that runs in place of the
operator: it takes the same arguments with local tensors. Called once per plan."""
Prepare = Callable[[Layout, torch.Tensor], torch.Tensor]
"""Takes (layout, local tensor) of an operand, and returns the local tensor as a kernel needs it."""


def contiguous(layout: Layout, local: torch.Tensor) -> torch.Tensor:
    """Prepare operands for kernels that only take contiguous tensors, or warn about others."""
    return local.contiguous()


@dataclass(frozen=True)
class TablePlan:
    """The layouts that the tensors of a call must have, and those of its results."""

    operator: _torch.Operator
    arguments: tuple[Any, ...]  # with layouts in place of tensors
    operands: tuple[tuple[int, Layout], ...]  # the layouts among them, by argument number
    results: tuple[Moved | None, ...]

    @staticmethod
    def of(
        operator: _torch.Operator, given: Sequence[Any], chosen: Assignment, made: Sequence[OneDevice | None],
        wishes: Sequence[Wanted | None],
    ) -> TablePlan:  # fmt: skip
        """Make a plan from the arguments (with layouts), the row per mesh dimension, and the results on one device."""
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
        """Return a call that runs `local` on local tensors, or else the operator.

        If it `communicates`, it runs on every rank of the mesh, else not on ranks with empty operands or results.
        """
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
        """Whether this rank has an empty shard of a non-empty operand, or of all results.

        Some kernels refuse empty tensors.
        """
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
    """Return the operator as a function of all arguments in the order of its schema."""
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
