"""Strips with long rows: operators are far slower along a short last dimension."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Turn:
    """Exchanges the longest spatial dimension of a strip and its last one."""

    axis: int
    last: int

    @staticmethod
    def of(tensor: torch.Tensor) -> Turn:
        sizes = list(tensor.shape[2:])
        last = len(sizes) - 1
        longest = sizes.index(max(sizes))
        thin = sizes[last] < 16 <= sizes[longest] and tensor.stride(1) != 1
        return Turn(longest + 2 if thin else last + 2, last + 2)

    def tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor if self.axis == self.last else tensor.transpose(self.axis, self.last).contiguous()

    def sizes(self, sizes: Sequence[int]) -> list[int]:
        turned = list(sizes)
        here, there = self.axis - 2, self.last - 2
        turned[here], turned[there] = turned[there], turned[here]
        return turned

    def back(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor if self.axis == self.last else tensor.transpose(self.axis, self.last)
