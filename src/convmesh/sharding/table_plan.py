"""The plan of a call whose rule is a sharding table: operands to redistribute, a local call, results to wrap."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import zip_longest
from math import prod
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from .. import _torch
from .layout import Layout
from .redistribute import move, relocated
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
class Result:
    """Where a result is after the local call, and where it goes."""

    computed: Layout
    wanted: Layout
    memory_format: torch.memory_format | None  # None for strides of no format

    @staticmethod
    def of(computed: Layout, wish: Wanted | None) -> Result:
        at = computed.placements if wish is None else [wish.becomes(*entry) for entry in enumerate(computed.placements)]
        dense = computed.stride == computed.dense.stride
        return Result(computed, computed.placed(at), computed.memory_format if dense else None)

    @property
    def moves(self) -> bool:
        return self.computed.placements != self.wanted.placements

    def wrap(self, local: torch.Tensor) -> DTensor:
        if local.dtype != self.wanted.dtype:
            local = local.to(self.wanted.dtype)
        if self.moves:
            local = relocated(local, self.computed, self.wanted)
        if self.memory_format is None:
            return _torch.wrap(self.wanted.laid(local), self.wanted.spec)
        return _torch.wrap(local.contiguous(memory_format=self.memory_format), self.wanted.spec)


@dataclass(frozen=True)
class TablePlan:
    """A call that is ready to be made: where the tensors have to be, and where the results then are."""

    operator: _torch.Operator
    arguments: tuple[Any, ...]  # with the layouts of tensors
    operands: tuple[tuple[int, Layout], ...]  # those, by the number of the argument
    results: tuple[Result | None, ...]
    local: Local | None
    prepare: Prepare | None
    communicates: bool  # the local call, which is made on every rank of the mesh then
    single: bool  # the operator returns one tensor, and no tuple
    moves: bool  # an operand has to be redistributed

    @staticmethod
    def of(
        operator: _torch.Operator, args: Sequence[Any], given: Mapping[int, Layout | None], chosen: Assignment,
        made: Sequence[OneDevice | None], wishes: Sequence[Wanted | None] = (), local: Local | None = None,
        prepare: Prepare | None = None, communicates: bool = False,
    ) -> TablePlan:  # fmt: skip
        """Of the arguments, by their numbers where the tensors among them are, the chosen rows for these, and what one
        device returns."""
        operands = tuple(
            (number, layout.placed(input_placements(chosen, place)))
            for place, (number, layout) in enumerate(given.items())
            if layout is not None
        )
        mesh = operands[0][1].mesh
        results = tuple(
            one and Result.of(Layout(mesh, output_placements(chosen, place), *one), wish)
            for place, (one, wish) in enumerate(zip_longest(made, wishes))
        )
        moves = any(layout.placements != given[number].placements for number, layout in operands)  # type: ignore[union-attr]
        single = _torch.gives_one_tensor(operator)
        placed = dict(operands)
        arguments = tuple(placed.get(number, value) for number, value in enumerate(args))
        return TablePlan(operator, arguments, operands, results, local, prepare, communicates, single, moves)

    def operand(self, number: int = 0) -> Layout:
        return self.operands[number][1]

    @cached_property
    def ready(self) -> DeviceMesh | None:
        """The mesh, if this rank is in it and uses its local tensors as they are."""
        return self.operand().mesh if self.operand().present and not self.moves else None

    @cached_property
    def numbers(self) -> tuple[int, ...]:
        """Which of the arguments are tensors."""
        return tuple(number for number, _ in self.operands)

    @cached_property
    def local_shapes(self) -> list[tuple[int, ...]]:
        return [layout.local_shape for _, layout in self.operands]

    def fits(self, values: Sequence[Any]) -> bool:
        """Whether local tensors have the shapes that their placements say; `move` complains of others."""
        return [values[number].shape for number in self.numbers] == self.local_shapes

    def run(self, args: Sequence[Any]) -> Any:
        """Redistribute the operands, compute, and wrap."""
        values = list(args)
        for number, layout in self.operands:
            values[number] = move(args[number], layout)
        if self.operand().present:
            return self.compute(values)
        like = args[self.numbers[0]]
        return self._returned([one and one.wanted.absent(like) for one in self.results])

    def compute(self, values: list[Any]) -> Any:
        """On the local tensors of a rank of the mesh."""
        if self._contributes_zeros:
            return self._zeros(values[self.numbers[0]])
        if self.prepare is not None:
            for number, layout in self.operands:
                values[number] = self.prepare(layout, values[number])
        found = self._call(*values)
        if self.single:
            return self.results[0].wrap(found)  # type: ignore[union-attr]
        pairs = zip(self.results, found, strict=True)
        return tuple([None if one is None or made is None else one.wrap(made) for one, made in pairs])

    @cached_property
    def _call(self) -> Callable[..., Any]:
        if self.local is not None:
            return self.local(self, *self.arguments)
        known = _torch.signature(self.operator)
        return self.operator if known.by_name == len(known.names) else partial(_called, self.operator)

    @cached_property
    def _contributes_zeros(self) -> bool:
        """Whether this rank has nothing of an operand of which others have something, or of the results. Some kernels
        refuse empty tensors."""
        if self.communicates:
            return False
        return any(prod(layout.shape) and not prod(layout.local_shape) for _, layout in self.operands) or not any(
            one is not None and prod(one.computed.local_shape) for one in self.results
        )

    def _zeros(self, like: torch.Tensor) -> Any:
        def zeros(layout: Layout) -> torch.Tensor:
            return like.new_zeros(layout.local_shape, dtype=layout.dtype)

        return self._returned([one and one.wrap(zeros(one.computed)) for one in self.results])

    def _returned(self, results: list[Any]) -> Any:
        return results[0] if self.single else tuple(results)


def _called(operator: _torch.Operator, *values: Any) -> Any:
    return _torch.call(operator, values)
