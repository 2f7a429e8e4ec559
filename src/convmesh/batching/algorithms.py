"""The ways to compute a mapped contraction, behind one interface: the folds, and the loop. `patches` and `direct` have
the rest.

Everything here reaches its result through aten's own convolution, reshape and movedim alone, so that it also
works where the mapped values are DTensors or mapped once more.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from typing import Any

import torch
from torch import Tensor

from ..kernels.memory import new_empty
from ._functorch import Nature
from .contraction import FACTORS, Contraction
from .folding import Mapped, Operand, fold, unfold_from, unfold_result


@dataclass(frozen=True, eq=False)
class Machine:
    """What a choice goes by beside the call: what the machine has, or all those have that must choose alike.

    Asked when it is needed: to see whether there are kernels of our own may mean to compile them.
    """

    has_kernels: Callable[[], bool]


@dataclass(frozen=True)
class Task:
    """A contraction over `batch` samples, with all that the choice of an algorithm may depend on."""

    contraction: Contraction
    batch: int
    mapped: tuple[bool, bool]
    nature: Nature
    dtype: str
    itemsize: int
    device: str
    threads: int
    machine: Machine
    exact: bool = False  # nothing may round more than the definition does
    lies_folded: bool = False  # an activation has its samples within its batch, as folds leave them

    @property
    def both_mapped(self) -> bool:
        return all(self.mapped)

    @property
    def is_empty(self) -> bool:
        return self.multiplications == 0

    @property
    def multiplications(self) -> int:
        return self.batch * self.contraction.multiplications

    @cached_property
    def result_bytes(self) -> int:
        return self.batch * prod(self.contraction.shape(self.contraction.wanted)) * self.itemsize

    @cached_property
    def prepared(self) -> dict[Any, Any]:
        """What an algorithm has made once for this task."""
        return {}

    @property
    def may_write(self) -> bool:
        """Whether results may be written into a tensor made beforehand."""
        return self.nature in (Nature.PLAIN, Nature.TRACED)

    def opaque(self, batch: int, mapped: tuple[bool, bool]) -> Task:
        """The same for so many samples, by what dispatches further alone."""
        return replace(self, batch=batch, mapped=mapped, nature=Nature.OPAQUE)


class Algorithm(ABC):
    name: str
    is_torchs_own: bool = False  # torch's batching rules do the same

    @abstractmethod
    def applies(self, task: Task) -> bool: ...

    @abstractmethod
    def run(self, task: Task, first: Operand, second: Operand, bias: Mapped | None) -> Mapped:
        """The contraction of every sample. The bias, if any, is that of a forward operator."""


class Fold(Algorithm):
    """One operand is mapped: B joins the size which that operand shares with the result."""

    is_torchs_own = True

    def __init__(self, letter: str) -> None:
        self.letter = letter
        self.name = f"fold-{letter.lower()}"

    def applies(self, task: Task) -> bool:
        return not task.both_mapped and shared_letter(task) == self.letter

    def run(self, task: Task, first: Operand, second: Operand, bias: Mapped | None) -> Mapped:
        product, groups = task.contraction, task.contraction.geometry.groups
        in_channels = self.letter == product.wanted.value[1]
        late_bias = None if in_channels or bias is None or bias.dim is None else bias
        if bias is None or late_bias is not None:
            folded_bias = None
        else:
            folded_bias = fold(spread(bias, task.batch), 0, groups) if in_channels else bias.value
        a, b = (operand.into(self.letter, groups) for operand in (first, second))
        result = product.with_longer(self.letter, task.batch)(a, b, folded_bias)
        behind = any(operand.goes_behind(self.letter) for operand in (first, second))
        mapped = unfold_from(result, product.wanted, self.letter, groups, task.batch, behind)
        return mapped if late_bias is None else add_bias(mapped, late_bias)


class FoldGroups(Algorithm):
    """Both operands are mapped: every sample is a group (or several) of one convolution."""

    name = "fold-groups"
    is_torchs_own = True

    def applies(self, task: Task) -> bool:
        return task.both_mapped

    def run(self, task: Task, first: Operand, second: Operand, bias: Mapped | None) -> Mapped:
        product = task.contraction
        folded_bias = None if bias is None else fold(spread(bias, task.batch), 0, 1)
        result = product.with_groups(task.batch)(first.into_groups(), second.into_groups(), folded_bias)
        return unfold_result(result, product.wanted.channels, 1, task.batch)


class Loop(Algorithm):
    """One sample after the other, each by the stock operator."""

    name = "loop"

    def applies(self, task: Task) -> bool:
        # A loop over anything that is not a tensor of its own would only multiply dispatch.
        return any(task.mapped) and task.nature is not Nature.OPAQUE

    def run(self, task: Task, first: Operand, second: Operand, bias: Mapped | None) -> Mapped:
        firsts, seconds = _samples(first.mapped, task.batch), _samples(second.mapped, task.batch)
        biases = [None] * task.batch if bias is None else _samples(bias, task.batch)
        results = (task.contraction(*sample) for sample in zip(firsts, seconds, biases, strict=True))
        if not task.may_write:
            return Mapped(torch.stack(list(results)), 0)
        shape = task.contraction.shape(task.contraction.wanted)
        gathered = new_empty(first.value, (task.batch, *shape))
        for target, result in zip(gathered.unbind(), results, strict=True):
            target.copy_(result)
        return Mapped(gathered, 0)


def shared_letter(task: Task) -> str:
    """The size that the only mapped operand shares with the result."""
    role = FACTORS[task.contraction.wanted][task.mapped.index(True)]
    (letter,) = set(role.value) & set(task.contraction.wanted.value)
    return letter


def spread(bias: Mapped, batch: int) -> Mapped:
    """[O] or [B O] -> [B O]"""
    return Mapped(bias.value.expand(batch, -1), 0) if bias.dim is None else Mapped(bias.in_front, 0)


def add_bias(result: Mapped, bias: Mapped) -> Mapped:
    """[B N O *] [B O] -> [B N O *], for a result that may be the same for all samples."""
    value = result.value.unsqueeze(0) if result.dim is None else result.in_front
    biases = bias.in_front.unsqueeze(1)
    return Mapped(value + biases.reshape(*biases.shape, *[1] * (value.ndim - 3)), 0)


def _samples(mapped: Mapped, batch: int) -> list[Tensor]:
    return [mapped.value] * batch if mapped.dim is None else list(mapped.value.unbind(mapped.dim))
