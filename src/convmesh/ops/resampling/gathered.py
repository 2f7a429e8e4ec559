"""Resampling of a small tile: put together with its halos first, and then one call of the operator.

The operator measures from the beginning of what it gets. So a block begins where an index of the one side and one of
the other begin at the same place, which may be before what is read: there it is filled with zeros, that no target of
this rank reads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import gcd
from typing import NamedTuple

import torch

from ...comm import HaloBlock
from ...geometry import Interval
from .._core.tiles import Tiling

# Elements of a tile of which a copy takes less than the operators that compute its border anew.
FEW_ELEMENTS = 2**16
# By how many indices, and by which part of what is read, a block may be larger than that.
MOST_MORE, LARGEST_MORE = 4, 0.25


class Along(NamedTuple):
    """Along one dimension: the sources that the operator gets, and the targets that it makes of them."""

    block: Interval
    produced: Interval


def along_block(read: Interval, targets: Interval, source_size: int, target_size: int) -> Along | None:
    """The smallest that has all that is read, and makes all of these targets, at the ratio of the sizes. None where
    that is much more than what is read, or all there is: sizes without a common divisor begin together only once."""
    count = gcd(source_size, target_size)
    sources, makes = source_size // count, target_size // count  # so many of the one side are as long as of the other
    first = min(read.start // sources, targets.start // makes)
    stop = max(-(-read.stop // sources), -(-targets.stop // makes))
    block, produced = (Interval(first * each, stop * each) for each in (sources, makes))
    much = block.size - read.size > max(MOST_MORE, LARGEST_MORE * read.size)
    everything = block.size == source_size > read.size or produced.size == target_size > targets.size
    return None if much or everything else Along(block, produced)


@dataclass(frozen=True, eq=False)
class Gathered:
    """What puts a block together, and which part of the operator's result this rank owns."""

    block: HaloBlock
    given: list[int]  # the shape of the block
    shape: list[int]  # and of the operator's result
    own: tuple[tuple[int, int, int], ...]  # where it is of it: dimension, start and length

    @staticmethod
    def of(tiling: Tiling, sides: Sequence[Along], given: list[int], shape: list[int]) -> Gathered | None:
        """None where what is needed is no block."""
        block = tiling.source_halos.block(tuple(side.block for side in sides), len(shape), fills=True)
        if block is None:
            return None
        places = zip(tiling.dims, sides, tiling.targets, strict=True)
        own = (
            (dim, mine.start - side.produced.start, mine.size) for dim, side, mine in places if mine != side.produced
        )
        return Gathered(block, given, shape, tuple(own))

    def of_own(self, y: torch.Tensor) -> torch.Tensor:
        """This rank's targets."""
        for part in self.own:
            y = y.narrow(*part)
        return y
