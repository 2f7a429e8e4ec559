"""im2col: the image as a matrix of patches, so that weight gradients are matrix products.

With P [B g, (c k), (N l)],
    [B g, o, (N l)] [B g, (N l), (c k)] -> [B g, o, (c k)]     the kernel
"""

from __future__ import annotations

from math import prod

import torch
import torch.nn.functional as F
from torch import Tensor

from ..kernels.memory import contiguous, new_empty
from .algorithms import Algorithm, Task
from .contraction import Role
from .folding import Mapped, Operand

# Patches are as many times larger than the image as the kernel has taps. They are made for so many samples at a time
# that they take about as much as a cache holds; those of a single sample may take more, up to the limit.
WORKSPACE = 8 * 2**20
WORKSPACE_LIMIT = 128 * 2**20


class View:
    """The sizes of a task, and its tensors as matrices."""

    def __init__(self, task: Task) -> None:
        product = task.contraction
        self.geometry = product.geometry
        self.N, self.C, *_ = product.image
        self.O, self.c, *kernel = product.kernel
        self.o = self.O // product.geometry.groups
        self.kernel, self.response = tuple(kernel), product.response[2:]
        self.taps, self.places = prod(kernel), self.N * prod(self.response)

    def response_matrix(self, response: Tensor) -> Tensor:
        """`[B N (g o) *] -> [B g, o, (N l)]`"""
        return contiguous(response.transpose(1, 2)).view(-1, self.o, self.places)

    def patches(self, image: Tensor) -> Tensor:
        """`[B N C *] -> [B g, (c k), (N l)]`"""
        padded = self._padded(image)
        batch, channels, number, *space = padded.stride()
        taps = [step * dilation for step, dilation in zip(space, self.geometry.dilation, strict=True)]
        places = [step * stride for step, stride in zip(space, self.geometry.stride, strict=True)]
        overlapping = padded.as_strided(
            (image.shape[0], self.C, *self.kernel, self.N, *self.response),
            (batch, channels, *taps, number, *places),
            padded.storage_offset(),
        )
        return contiguous(overlapping).view(-1, self.c * self.taps, self.places)

    def _padded(self, image: Tensor) -> Tensor:
        """`[B N C *] -> [B C N *]`, padded."""
        image = image.transpose(1, 2)
        if not any(self.geometry.padding):
            return image
        return F.pad(image, [p for p in reversed(self.geometry.padding) for _ in range(2)])


class Unfold(Algorithm):
    """Weight gradients: unfold patches, a bounded number of samples at a time, and multiply.

    For devices without compiled kernels, if a benchmark finds it faster there.
    """

    name = "unfold"

    def applies(self, task: Task) -> bool:
        usable = task.both_mapped and task.contraction.wanted is Role.KERNEL and task.may_write and not task.is_empty
        return usable and self._per_sample(task) <= WORKSPACE_LIMIT

    def run(self, task: Task, first: Operand, second: Operand, bias: Mapped | None) -> Mapped:
        view = View(task)
        result = new_empty(first.value, (task.batch, *task.contraction.kernel))
        at_once = max(1, min(task.batch, WORKSPACE // max(1, self._per_sample(task))))
        parts = (each.split(at_once) for each in (first.in_front(), second.in_front(), result))
        for image, response, target in zip(*parts, strict=True):
            matrices = target.view(-1, view.o, view.c * view.taps)
            torch.bmm(view.response_matrix(response), view.patches(image).transpose(1, 2), out=matrices)
        return Mapped(result, 0)

    @staticmethod
    def _per_sample(task: Task) -> int:
        view = View(task)
        return view.C * view.taps * view.places * task.itemsize
