"""Weighted sums of indices along one dimension, as resampling makes them."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ...geometry import Interval, Taps
from .._core.cached_tensors import Numbers


@dataclass(frozen=True)
class Weighing:
    """Along one dimension: this rank's targets are the sum over `taps` of weighted indices of its block."""

    dim: int
    growth: float
    taps: tuple[tuple[Numbers, Numbers | None], ...]  # no weights: all are 1
    unread: Numbers  # targets that nothing goes into

    @staticmethod
    def of(dim: int, growth: float, all_taps: Taps, targets: Interval, block: Interval) -> Weighing:
        mine = all_taps.of[targets.start : targets.stop]
        rows = []
        for number in range(max((len(some) for some in mine), default=0)):
            # A target with fewer taps than others repeats its last, and weighs it with nothing.
            picked = [some[min(number, len(some) - 1)] if some else (block.start, 0.0) for some in mine]
            weights = [tap[1] if number < len(some) else 0.0 for tap, some in zip(picked, mine, strict=True)]
            plain = all(weight == 1 for weight, some in zip(weights, mine, strict=True) if some)
            rows.append((Numbers([tap[0] - block.start for tap in picked]), None if plain else Numbers(weights)))
        return Weighing(dim, growth, tuple(rows), Numbers([at for at, some in enumerate(mine) if not some]))

    def apply(self, x: torch.Tensor) -> torch.Tensor:
        total: torch.Tensor | None = None
        for index, weights in self.taps:
            part = x.index_select(self.dim, index.on(x.device))
            if weights is None:
                total = part if total is None else total.add_(part)
            elif total is None:
                total = part.mul_(weights.along(self.dim, part))
            else:
                total.addcmul_(part, weights.along(self.dim, part))
        if total is None:
            shape = [*x.shape]
            shape[self.dim] = len(self.unread.values)
            return x.new_zeros(shape)
        return total.index_fill_(self.dim, self.unread.on(x.device), 0) if self.unread.values else total


Weighings = tuple[Weighing, ...]
