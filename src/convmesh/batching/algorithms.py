"""Algorithms for vmapped contractions behind one interface: folding into one convolution, and a loop over samples.

The algorithms of this file use only aten's convolution, reshape and movedim, so they also work for DTensors and nested
vmaps. Others are in `patches.py` and `direct.py`.
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
    """The facts about a machine that a choice depends on, or the common facts of all ranks that must choose alike.

    They are asked for only when needed: finding out whether there are compiled kernels may compile them.
    """

    has_kernels: Callable[[], bool]


@dataclass(frozen=True)
class Task:
    """A contraction for `batch` samples, with everything that the choice of an algorithm may depend on."""

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
        """What algorithms have prepared for this task."""
        return {}

    @property
    def may_write(self) -> bool:
        """Whether results may be written into a preallocated tensor."""
        return self.nature in (Nature.PLAIN, Nature.TRACED)

    def opaque(self, batch: int, mapped: tuple[bool, bool]) -> Task:
        """Return the same task for another number of samples, restricted to algorithms of dispatched operators."""
        return replace(self, batch=batch, mapped=mapped, nature=Nature.OPAQUE)


class Algorithm(ABC):
    name: str
    is_torchs_own: bool = False  # torch's batching rules do the same

    @abstractmethod
    def applies(self, task: Task) -> bool: ...

    @abstractmethod
    def run(self, task: Task, first: Operand, second: Operand, bias: Mapped | None) -> Mapped:
        """Return the contraction of each sample. A bias is only given for forward operators."""


class Fold(Algorithm):
    """One operand is mapped: B is merged into the dimension that this operand shares with the result."""

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
    """Both operands are mapped: each sample becomes one or more groups of one convolution."""

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
    """One sample after the other, each with torch's operator."""

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
    """Return the dimension that the only mapped operand shares with the result."""
    role = FACTORS[task.contraction.wanted][task.mapped.index(True)]
    (letter,) = set(role.value) & set(task.contraction.wanted.value)
    return letter


def spread(bias: Mapped, batch: int) -> Mapped:
    """`[O] or [B O] -> [B O]`"""
    return Mapped(bias.value.expand(batch, -1), 0) if bias.dim is None else Mapped(bias.in_front, 0)


def add_bias(result: Mapped, bias: Mapped) -> Mapped:
    """`[B N O *] [B O] -> [B N O *]`; the result may have no B, and is then the same for all samples."""
    value = result.value.unsqueeze(0) if result.dim is None else result.in_front
    biases = bias.in_front.unsqueeze(1)
    return Mapped(value + biases.reshape(*biases.shape, *[1] * (value.ndim - 3)), 0)


def _samples(mapped: Mapped, batch: int) -> list[Tensor]:
    return [mapped.value] * batch if mapped.dim is None else list(mapped.value.unbind(mapped.dim))
