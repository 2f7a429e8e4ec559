"""Merging the mapped dimension B into another dimension of an operand, and taking it out of a result again."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

from ..geometry import Shape
from .contraction import Role


class Mapped(NamedTuple):
    """A tensor, and which of its dimensions vmap maps; None if it is the same for all samples."""

    value: Tensor
    dim: int | None

    @property
    def sample_shape(self) -> Shape:
        shape = tuple(self.value.shape)
        return shape if self.dim is None else shape[: self.dim] + shape[self.dim + 1 :]

    @property
    def in_front(self) -> Tensor:
        assert self.dim is not None
        return self.value.movedim(self.dim, 0)


class Operand:
    """One factor of a contraction. Folded forms are kept: two gradients of one call share them."""

    def __init__(self, role: Role, mapped: Mapped) -> None:
        self.role = role
        self.mapped = mapped
        self._folded: dict[str, Tensor] = {}

    @property
    def is_mapped(self) -> bool:
        return self.mapped.dim is not None

    @property
    def value(self) -> Tensor:
        return self.mapped.value

    def in_front(self) -> Tensor:
        """[B ...]"""
        return self._keep("front", lambda: self.mapped.in_front)

    def into(self, letter: str, groups: int) -> Tensor:
        """B folded into the axis N, C or O."""
        if not self.is_mapped or letter not in self.role.value:
            return self.value
        return self._keep(letter, lambda: fold(self.mapped, *_axis_and_groups(self.role, letter, groups)))

    def into_groups(self) -> Tensor:
        """(B g ...) along the channels."""
        return self._keep("groups", lambda: fold(self.mapped, self.role.channels, 1))

    def _keep(self, name: str, make: Callable[[], Tensor]) -> Tensor:
        if name not in self._folded:
            self._folded[name] = make()
        return self._folded[name]


def fold(mapped: Mapped, axis: int, groups: int) -> Tensor:
    """[B .. (g a) ..] -> [.. (g B a) ..]; without groups that is [.. (B a) ..]."""
    assert mapped.dim is not None
    if groups == 1:
        return _merge(mapped.value.movedim(mapped.dim, axis), axis, 2)
    split = _split(mapped.in_front, axis + 1, (groups, -1))
    return _merge(split.movedim(0, axis + 1), axis, 3)


def unfold_result(result: Tensor, axis: int, groups: int, batch: int) -> Mapped:
    """[.. (g B a) ..] -> [.. B (g a) ..], in place where there is one group, else with B in front."""
    if groups == 1:
        return Mapped(_split(result, axis, (batch, -1)), axis)
    in_front = _split(result, axis, (groups, batch, -1)).movedim(axis + 1, 0)
    return Mapped(_merge(in_front, axis + 1, 2), 0)


def unfold_from(result: Tensor, role: Role, letter: str, groups: int, batch: int) -> Mapped:
    return unfold_result(result, *_axis_and_groups(role, letter, groups), batch)


def _axis_and_groups(role: Role, letter: str, groups: int) -> tuple[int, int]:
    """Where the letter is, and how many groups stand before it: N knows no groups, nor does C of the kernel."""
    axis = role.value.index(letter)
    return axis, groups if axis == role.channels else 1


def _merge(tensor: Tensor, axis: int, count: int) -> Tensor:
    shape = tensor.shape
    merged = 1
    for size in shape[axis : axis + count]:
        merged = merged * size
    return tensor.reshape(*shape[:axis], merged, *shape[axis + count :])


def _split(tensor: Tensor, axis: int, sizes: tuple[int, ...]) -> Tensor:
    """The last of `sizes` is -1; worked out by hand, because torch cannot where another size is 0."""
    known = 1
    for size in sizes[:-1]:
        known = known * size
    rest = tensor.shape[axis] // known if known else 0
    return tensor.reshape(*tensor.shape[:axis], *sizes[:-1], rest, *tensor.shape[axis + 1 :])
