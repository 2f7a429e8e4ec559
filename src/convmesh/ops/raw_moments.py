"""Mean and variance from sums and sums of squares, for sets in which that loses nothing.

E[x^2] - E[x]^2 rounds what it subtracts, so its relative error is that of E[x^2], times E[x^2] over the variance. Far
from zero this ruins a variance. Where the mean is of the size of the deviation or less it is a few roundings, and as
the sums are made of rows, each rounded on its own and then added in float64, most of that averages out over the rows:
the result is as good as that of a kernel which subtracts the mean first. So every set is looked at before its variance
is used, and those where it would be worse are left to such a kernel.

It is worth the trouble because two plain sums over what stays in the cache take less than two thirds of its time.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import sqrt

import torch

FEWEST_ROWS = 4  # of a set
FEWEST_VALUES = 1 << 18  # below, most of the time passes between the kernels
MOST_SETS = 512  # which are looked at one by one
AT_ONCE = 1 << 20  # values that are still in the cache when they are read once more
SAMPLE = 16  # rows
LARGEST_EXCESS = 5.0  # of E[x^2] over the variance: means of up to two deviations

Found = tuple[torch.Tensor, torch.Tensor, list[int]]


def raw_moments(rows: torch.Tensor, sets: int) -> Found | None:
    """Mean and variance of sets that are made of equally many rows, and those sets for which they cannot be used.

    None if the sets are too many or too small, or if most of them, by the look of a few rows, would be left out.
    """
    number, row = len(rows) // sets, rows.shape[1]
    if number < FEWEST_ROWS or rows.numel() < FEWEST_VALUES or sets > MOST_SETS or not _worth_it(rows):
        return None
    pieces = rows.split(max(1, AT_ONCE // row))
    kinds = zip(*((piece.sum(1), torch.linalg.vector_norm(piece, dim=1)) for piece in pieces), strict=True)
    sums = torch.cat([part for kind in kinds for part in kind]).double().view(2, sets, number)
    sums[1].square_()
    pairs = [(a / (number * row), b / (number * row)) for a, b in zip(*sums.sum(2).tolist(), strict=True)]
    mean = torch.tensor([mean for mean, _ in pairs], dtype=rows.dtype)
    var = torch.tensor([square - mean * mean for mean, square in pairs], dtype=rows.dtype)
    return mean, var, _unusable(pairs, min(LARGEST_EXCESS, sqrt(number)), torch.finfo(rows.dtype))


def _worth_it(rows: torch.Tensor) -> bool:
    """Whether half of some rows, from all over, could be used if they were sets."""
    sample = rows[:: -(-len(rows) // SAMPLE)]
    sums = zip(sample.sum(1).tolist(), torch.linalg.vector_norm(sample, dim=1).tolist(), strict=True)
    pairs = [(plain / rows.shape[1], norm * norm / rows.shape[1]) for plain, norm in sums]
    return 2 * len(_unusable(pairs, LARGEST_EXCESS, torch.finfo(rows.dtype))) <= len(pairs)


def _unusable(pairs: Sequence[tuple[float, float]], excess: float, limits: torch.finfo) -> list[int]:
    """Sets by their mean and E[x^2]. This is infinite, or no number, where squares are too large or values are none,
    and where squares are small they have lost bits, unless all values are zero."""
    least, share = limits.tiny / limits.eps, 1 - 1 / excess
    return [
        number
        for number, (mean, square) in enumerate(pairs)
        if not (mean * mean <= share * square and (least <= square <= limits.max or square == 0))
    ]
