"""Weighted sums of indices along one dimension: interpolation and its gradients on local tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ... import _torch
from ...geometry import Weighted
from .._core.cached_tensors import Constant


@dataclass(frozen=True)
class WeightedSum:
    """Along one dimension: each target is the sum over `taps` of one index of a block times a weight."""

    dim: int
    taps: tuple[tuple[Constant, Constant | None], ...]  # no weights: all are 1
    unread: Constant  # targets that nothing adds to

    @staticmethod
    def of(dim: int, targets: Sequence[Weighted], start: int) -> WeightedSum:
        """Of the taps of some targets, and the index at which the block starts."""
        rows = []
        for number in range(max(map(len, targets), default=0)):
            # A target with fewer taps than others repeats its last, with weight 0.
            picked = [taps[min(number, len(taps) - 1)] if taps else (start, 0.0) for taps in targets]
            weights = [tap[1] if number < len(taps) else 0.0 for tap, taps in zip(picked, targets, strict=True)]
            plain = all(weight == 1 for weight, taps in zip(weights, targets, strict=True) if taps)
            rows.append((Constant([tap[0] - start for tap in picked]), None if plain else Constant(weights)))
        return WeightedSum(dim, tuple(rows), Constant([at for at, taps in enumerate(targets) if not taps]))

    def apply(self, x: torch.Tensor) -> torch.Tensor:
        total: torch.Tensor | None = None
        for index, weights in self.taps:
            part = x.index_select(self.dim, index.on(x.device))
            if weights is None:
                total = part if total is None else total.add_(part)
            elif total is None:
                total = part.mul_(weights.along(self.dim, part))
            elif _torch.has_symbols(tuple(part.shape)):  # torch would expand the weights, which are no fake tensor
                total.add_(part.mul_(weights.along(self.dim, part)))
            else:
                total.addcmul_(part, weights.along(self.dim, part))
        if total is None:
            shape = [*x.shape]
            shape[self.dim] = len(self.unread.values)
            return x.new_zeros(shape)
        return total.index_fill_(self.dim, self.unread.on(x.device), 0) if self.unread.values else total


WeightedSums = tuple[WeightedSum, ...]
