"""Prepared calls: a plan on this rank, with every redistribution, local call and spec made once.

A rule's planner says where the tensors have to be, what is called with the local tensors, and where the results are
then (`Call`). The rest is the same for all rules, and for a rank that has nothing or is outside of the mesh.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import repeat, zip_longest
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from .. import _torch
from ..strides import Stride, Usual, has_idle_strides, usual
from . import copy_notes, gradient_placements, installation
from .assign import assign
from .errors import refuse
from .layout import Layout
from .redistribute import Step, plan_redistribution

Operand = Layout | Sequence[Layout | None] | None
"""Where an argument has to be: a tensor, or each of a list of tensors. None for one that is not used."""
Place = tuple[int | None, int]
"""Which argument is a list of tensors, if it is in one, and the number there or among the arguments."""


@dataclass(frozen=True)
class Moved:
    """A result that the local call leaves at one layout, and that is redistributed to another."""

    computed: Layout
    wanted: Layout


@dataclass(frozen=True)
class Reported:
    """A result of which only the local call knows the layout, as values tell how large it is: it returns the local
    tensor and the layout. A rank outside of the mesh returns nothing of `layout`."""

    layout: Layout

    @staticmethod
    def wrap(found: tuple[torch.Tensor, Layout]) -> DTensor:
        local, layout = found
        return Result(layout, None).wrap(local)


Goal = Layout | Moved | Reported
"""Where a result goes."""


@dataclass(frozen=True)
class Call:
    """What a planner makes of a call.

    `run` gets all arguments, with local tensors in place of tensors, and returns the local tensors of the results. They
    become tensors with the strides of one device. It runs on every rank of the mesh.
    """

    operands: Sequence[Operand]  # of the tensors, and lists of tensors, among the arguments
    results: Goal | Sequence[Goal | None]
    run: Callable[..., Any]
    view: bool = False  # the result is a view of the first argument
    # Results are copies that torch takes for views: how each is taken of the first argument, and put back there.
    copies: Sequence[tuple[copy_notes.Take, copy_notes.PutBack]] = ()
    writes: bool = False  # the result is written into the first argument, which is returned


@dataclass(frozen=True)
class Move:
    """A redistribution of a local tensor."""

    steps: tuple[Step, ...]
    stride: Stride

    @staticmethod
    def of(source: Layout, target: Layout) -> Move | None:
        """None where there is nothing to do."""
        if source.placements == target.placements or not source.present:
            return None
        return Move(plan_redistribution(source, target), target.stride)

    def __call__(self, local: torch.Tensor) -> torch.Tensor:
        for step in self.steps:
            local = step(local)
        return usual(local, self.stride)


class Result:
    """How the local tensor of a result becomes a DTensor: cast, redistributed, in the strides of one device."""

    __slots__ = ("dtype", "is_simple", "layout", "memory_format", "move", "spec")

    def __init__(self, result: Layout | Moved, stride: Stride | None):
        computed, wanted = (result.computed, result.wanted) if isinstance(result, Moved) else (result, result)
        if stride is not None and stride != wanted.stride:
            computed, wanted = replace(computed, stride=stride), replace(wanted, stride=stride)
        self.layout, self.dtype, self.spec = wanted, wanted.dtype, wanted.spec
        self.move = Move.of(computed, wanted)
        self.memory_format = wanted.memory_format if wanted.stride == wanted.dense.stride else None
        self.is_simple = self.memory_format is torch.contiguous_format and bool(wanted.shape)

    def wrap(self, local: torch.Tensor) -> DTensor:
        if local.dtype != self.dtype:
            local = local.to(self.dtype)
        if self.move is not None:
            local = self.move(local)
        if self.is_simple and local.is_contiguous():
            return _torch.new_dtensor(DTensor, local, self.spec, requires_grad=False)  # nearly always
        if self.memory_format is None:
            return _torch.wrap(self.layout.laid(local), self.spec)
        return _torch.wrap(local.contiguous(memory_format=self.memory_format), self.spec)


class Prepared:
    """A call of an operator on tensors of known layouts, ready to be made."""

    def __init__(
        self, operator: _torch.Operator, given: Sequence[Operand], call: Call, strides: Sequence[Stride | None],
        remembers: bool,
    ):  # fmt: skip
        """`given` are the layouts of the tensors among the arguments, and `strides` those of the results."""
        numbers = _torch.signature(operator).places
        self.tensors = [(place, layout) for place, layout in _by_place(numbers, given) if layout is not None]
        wanted = dict(_by_place(numbers, call.operands))
        first = self.tensors[0][1]
        self.operator, self.call, self.run = operator, call, call.run
        self.mesh, self.present = first.mesh, first.present
        self.shapes = [layout.local_shape for _, layout in self.tensors]
        odd = [(place, layout) for place, layout in self.tensors if has_idle_strides(layout.local_shape)]
        self.odd = [(place, Usual(layout.stride)) for place, layout in odd]
        self.unused = [place for place, _ in self.tensors if wanted.get(place) is None]
        self.moves = [
            (place, move)
            for place, layout in self.tensors
            if (target := wanted.get(place)) is not None and (move := Move.of(layout, target)) is not None
        ]
        self.single = isinstance(call.results, Goal)
        results = [call.results] if isinstance(call.results, Goal) else call.results
        self.results = [
            Result(one, stride) if isinstance(one, Layout | Moved) else one
            for one, stride in zip_longest(results, strides)
        ]
        self.is_new = not (call.view or call.copies or call.writes)
        # Where something has to be moved for it, every rank takes part.
        self.is_moved = call.writes and any(one and one.layout.placements != first.placements for one in self.results)
        self.hint = gradient_placements.hint_of(first.spec) if remembers else None

    def check(self, values: list[Any]) -> None:
        """Local tensors have the shapes that their placements say."""
        for ((outer, number), layout), shape in zip(self.tensors, self.shapes, strict=True):
            local = (values if outer is None else values[outer])[number]
            if self.present and tuple(local.shape) != shape:
                raise refuse("DTensor", f"its local tensor has shape {tuple(local.shape)}, not {shape}",
                             [("tensor", layout)], "shard it as torch.chunk does, as Shard requires")  # fmt: skip

    def make_usual(self, values: list[Any]) -> None:
        """Give kernels strides that one device could have had, as `_torch.local_of` does."""
        for (outer, number), made_usual in self.odd:
            into = values if outer is None else values[outer]
            into[number] = made_usual(into[number])

    def __call__(self, values: list[Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Of all arguments with local tensors, and of the arguments as they were given."""
        if self.hint is not None and gradient_placements.counts(args[0]):
            gradient_placements.by_shape.remember(*self.hint)
        if not self.present:
            return self._outside(values, args, kwargs)
        for (outer, number), move in self.moves:
            into = values if outer is None else values[outer]
            into[number] = move(into[number])
        for outer, number in self.unused:
            (values if outer is None else values[outer])[number] = None
        found = self.run(*values)
        if self.single:
            result: Any = self.results[0]
            return result.wrap(found) if self.is_new else self._of_first(result, found, args, kwargs)
        made = tuple([None if one is None or local is None else one.wrap(local)
                      for one, local in zip(self.results, found, strict=True)])  # fmt: skip
        return made if self.is_new else tuple(map(copy_of, made, repeat(args[0]), self.call.copies))

    def _of_first(self, result: Result, local: torch.Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What is a view or a copy of the first argument, or is written into it."""
        if self.call.view:
            return _torch.as_view(self.operator, args, kwargs, _torch.wrap(local, result.spec))
        if self.call.copies:
            return copy_of(result.wrap(local), args[0], self.call.copies[0])
        if self.is_moved or _torch.memory_of(local) != _torch.memory_of(_torch.local_of(args[0])):
            assign(args[0], result.wrap(local))
        return args[0]

    def _outside(self, values: list[Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What a rank outside of the mesh returns."""
        if self.call.writes:
            return args[0]
        outer, number = self.tensors[0][0]
        like = (values if outer is None else values[outer])[number]
        seen = self.results[0] if self.call.view else None
        if isinstance(seen, Result) and seen.dtype == like.dtype:  # of nothing, and yet in the same memory
            return _torch.as_view(self.operator, args, kwargs, _torch.wrap(like, seen.spec))
        results = [one and one.layout.absent(like) for one in self.results]
        return results[0] if self.single else tuple(results)


def _by_place(numbers: Sequence[int], operands: Sequence[Operand]) -> Iterator[tuple[Place, Layout | None]]:
    """The arguments of these numbers, and tensors in lists among them."""
    for number, operand in zip(numbers, operands, strict=True):
        if operand is None or isinstance(operand, Layout):
            yield (None, number), operand
        else:
            yield from (((number, at), layout) for at, layout in enumerate(operand))


def copy_of(part: Any, full: DTensor, ways: tuple[copy_notes.Take, copy_notes.PutBack]) -> Any:
    """`part`, a copy of some of `full` that torch takes for a view: what is written into it is put back."""
    if copy_notes.mark(part, full, *ways):
        installation.guard_writes()
    return part
