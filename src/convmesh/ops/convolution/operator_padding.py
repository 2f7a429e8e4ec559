"""How a block that is not the whole tensor is put to the operator, which pads both sides alike and likes long rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ...geometry import Window


@dataclass(frozen=True)
class Crop:
    """How a transposed convolution's full reach becomes what is wanted of it, along one dimension.

    The operator cuts `padding` from both sides and adds `extra` behind; `before` and `after` are left to cut
    (or, where negative, to fill with zeros) once it is done.
    """

    padding: int
    extra: int
    before: int
    after: int

    @staticmethod
    def of(window: Window, before: int, after: int) -> Crop:
        if before >= 0 and 0 <= before - after < max(window.stride, window.dilation):
            return Crop(before, before - after, 0, 0)
        padding = max(0, min(before, after))
        return Crop(padding, 0, before - padding, after - padding)


@dataclass(frozen=True)
class Turn:
    """Turns a strip so that its longest dimension is the last: kernels are far slower along a short last one."""

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
