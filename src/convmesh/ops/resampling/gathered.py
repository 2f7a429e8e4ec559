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


class Along(NamedTuple):
    """Along one dimension: the sources that the operator gets, and the targets that it makes of them."""

    block: Interval
    produced: Interval


def along_block(read: Interval, targets: Interval, source_size: int, target_size: int) -> Along:
    """The smallest that has all that is read, and makes all of these targets, at the ratio of the sizes."""
    count = gcd(source_size, target_size)
    sources, makes = source_size // count, target_size // count  # so many of the one side are as long as of the other
    first = min(read.start // sources, targets.start // makes)
    stop = max(-(-read.stop // sources), -(-targets.stop // makes))
    return Along(Interval(first * sources, stop * sources), Interval(first * makes, stop * makes))


@dataclass(frozen=True, eq=False)
class Gathered:
    """What puts a block together, and which part of the operator's result this rank owns."""

    block: HaloBlock
    shape: list[int]  # of the operator's result
    own: tuple[tuple[int, int, int], ...]  # where it is of it: dimension, start and length

    @staticmethod
    def of(tiling: Tiling, sides: Sequence[Along], shape: list[int]) -> Gathered | None:
        """None where what is needed is no block, or is far from where one begins or ends."""
        halos = tiling.source_halos
        block = halos.block(tuple(side.block for side in sides), len(shape), fills=True)
        sizes = zip(sides, halos.needed, strict=True)
        if block is None or any(side.block.size > 2 * read.size for side, read in sizes):
            return None
        places = zip(tiling.dims, sides, tiling.targets, strict=True)
        own = (
            (dim, mine.start - side.produced.start, mine.size) for dim, side, mine in places if mine != side.produced
        )
        return Gathered(block, shape, tuple(own))

    def of_own(self, y: torch.Tensor) -> torch.Tensor:
        """This rank's targets."""
        for part in self.own:
            y = y.narrow(*part)
        return y
