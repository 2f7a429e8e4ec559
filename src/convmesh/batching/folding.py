"""Merging the mapped dimension B into another dimension of an operand, and splitting it from a result again."""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from ..geometry import Shape
from ._functorch import unwrapped
from .contraction import Role


class Mapped(NamedTuple):
    """A tensor and its mapped dimension; None if it is the same for all samples."""

    value: Tensor
    dim: int | None

    @property
    def sample_shape(self) -> Shape:
        shape = tuple(self.value.shape)
        return shape if self.dim is None else shape[: self.dim] + shape[self.dim + 1 :]

    def is_sharded_along(self, axis: int) -> bool:
        """Whether the values are a DTensor that is sharded along this dimension of each sample."""
        dim = axis if self.dim is None or axis < self.dim else axis + 1
        return bool(self._cut_over(dim))

    @property
    def ranks(self) -> int:
        """Return the number of ranks over which the mapped dimension is sharded."""
        return 1 if self.dim is None else prod(self._cut_over(self.dim))

    def _cut_over(self, dim: int) -> list[int]:
        """Return the sizes of the mesh dimensions over which a dimension is sharded."""
        value = unwrapped(self.value)
        if not isinstance(value, DTensor):
            return []
        return [value.device_mesh.size(i) for i, placement in enumerate(value.placements) if placement.is_shard(dim)]

    @property
    def in_front(self) -> Tensor:
        assert self.dim is not None
        return self.value.movedim(self.dim, 0)


class Operand:
    """One factor of a contraction. Folded forms are cached, since the two gradients of a call share them."""

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
        """Return `[B ...]`."""
        return self._keep("front", lambda: self.mapped.in_front)

    def into(self, letter: str, groups: int) -> Tensor:
        """Return the values with B folded into the axis N, C or O."""
        if not self.is_mapped or letter not in self.role.value:
            return self.value
        axis_and_groups = _axis_and_groups(self.role, letter, groups)
        return self._keep(letter, lambda: fold(self.mapped, *axis_and_groups, self.goes_behind(letter)))

    def goes_behind(self, letter: str) -> bool:
        """Whether B is folded behind N: if N is sharded, it has to be the outer one to stay sharded."""
        return letter == "N" and self.is_mapped and self.mapped.is_sharded_along(0)

    def into_groups(self) -> Tensor:
        """Return the values with `(B g ...)` along the channels."""
        return self._keep("groups", lambda: fold(self.mapped, self.role.channels, 1))

    def _keep(self, name: str, make: Callable[[], Tensor]) -> Tensor:
        if name not in self._folded:
            self._folded[name] = make()
        return self._folded[name]


def fold(mapped: Mapped, axis: int, groups: int, behind: bool = False) -> Tensor:
    """`[B .. (g a) ..] -> [.. (g B a) ..]`; without groups `[.. (B a) ..]`, or `[(N B) ..]` with B behind N."""
    assert mapped.dim is not None
    if behind:
        return _merge(mapped.value.movedim(mapped.dim, 1), 0, 2)
    if groups == 1:
        return _merge(mapped.value.movedim(mapped.dim, axis), axis, 2)
    split = _split(mapped.in_front, axis + 1, (groups, -1))
    return _merge(split.movedim(0, axis + 1), axis, 3)


def unfold_result(result: Tensor, axis: int, groups: int, batch: int, behind: bool = False) -> Mapped:
    """`[.. (g B a) ..] -> [.. B (g a) ..]`, as a view if there is one group, else with B in front."""
    if behind:
        return Mapped(_split(result, 0, (result.shape[0] // batch, -1)), 1)
    if groups == 1:
        return Mapped(_split(result, axis, (batch, -1)), axis)
    in_front = _split(result, axis, (groups, batch, -1)).movedim(axis + 1, 0)
    return Mapped(_merge(in_front, axis + 1, 2), 0)


def unfold_from(result: Tensor, role: Role, letter: str, groups: int, batch: int, behind: bool) -> Mapped:
    return unfold_result(result, *_axis_and_groups(role, letter, groups), batch, behind)


def _axis_and_groups(role: Role, letter: str, groups: int) -> tuple[int, int]:
    """Return the axis of a dimension, and its number of groups: N has none, nor does C of the kernel."""
    axis = role.value.index(letter)
    return axis, groups if axis == role.channels else 1


def _merge(tensor: Tensor, axis: int, count: int) -> Tensor:
    shape = tensor.shape
    if isinstance(unwrapped(tensor), DTensor):
        # reshape goes by a DTensor's global strides, which need not be those of its parts.
        tensor = tensor.clone(memory_format=torch.contiguous_format)
    merged = 1
    for size in shape[axis : axis + count]:
        merged = merged * size
    return tensor.reshape(*shape[:axis], merged, *shape[axis + count :])


def _split(tensor: Tensor, axis: int, sizes: tuple[int, ...]) -> Tensor:
    """Split a dimension. The last of `sizes` is -1; torch cannot infer it if another size is 0."""
    known = 1
    for size in sizes[:-1]:
        known = known * size
    rest = tensor.shape[axis] // known if known else 0
    return tensor.reshape(*tensor.shape[:axis], *sizes[:-1], rest, *tensor.shape[axis + 1 :])
