"""Reshapes as groups of dimensions: which dimensions of one shape become which of another."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from .shards import Shards

Dims = tuple[int, ...]


@dataclass(frozen=True)
class Group:
    """Dimensions `before` that become the dimensions `after`, with the same number of elements."""

    before: Dims
    after: Dims


def groups(before: Sequence[int], after: Sequence[int]) -> list[Group]:
    """Return the smallest groups, in order. Dimensions of size 1 without a partner join a neighbour."""
    found, i, j = [], 0, 0
    while i < len(before) or j < len(after):
        start_i, start_j = i, j
        left = right = 1
        if i < len(before):
            left, i = before[i], i + 1
        if j < len(after):
            right, j = after[j], j + 1
        while left != right:
            if left < right:
                left, i = left * before[i], i + 1
            else:
                right, j = right * after[j], j + 1
        found.append(Group(tuple(range(start_i, i)), tuple(range(start_j, j))))
    return found


def dim_with_same_shards(
    dim: int, before: Sequence[int], after: Sequence[int], mesh_sizes: tuple[int, ...]
) -> int | None:
    """Return the dimension of the new shape that is sharded over the same ranks as `dim` of the old one, or None."""
    group = next(group for group in groups(before, after) if dim in group.before)
    if len(group.before) == 1 and len(group.after) == 1:
        return group.after[0]
    # Only shards of the outermost dimension are contiguous ranges of the elements.
    if prod(before[d] for d in group.before if d < dim) != 1:
        return None
    candidates = [d for d in group.after if prod(after[e] for e in group.after if e < d) == 1]
    inner = prod(before[d] for d in group.before if d > dim)
    for new in reversed(candidates):
        new_inner = prod(after[d] for d in group.after if d > new)
        old, now = Shards(before[dim], mesh_sizes), Shards(after[new], mesh_sizes)
        if old.scaled_runs(inner) == now.scaled_runs(new_inner):
            return new
    return None


def are_merged(first: int, second: int, before: Sequence[int], after: Sequence[int]) -> bool:
    """Whether two dimensions of the old shape end up in the same group of the new one."""
    return any(first in group.before and second in group.before for group in groups(before, after))
