"""The ways that make matrix products of a contraction whose operands are both mapped.

With the image laid out as patches P [B g, (c k), (N l)], one column for each place of the kernel,
    [B g, o, (c k)] [B g, (c k), (N l)] -> [B g, o, (N l)]     the response
    [B g, o, (N l)] [B g, (N l), (c k)] -> [B g, o, (c k)]     the kernel
    [B g, (c k), o] [B g, o, (N l)]     -> [B g, (c k), (N l)] the image, as patches to be added up.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product as all_combinations
from math import prod

import torch
import torch.nn.functional as F
from torch import Tensor

from .algorithms import Algorithm, Task, spread
from .contraction import Role
from .folding import Mapped, Operand
from .memory import contiguous, new_empty, new_zeros
from .pointwise import is_pointwise

# Patches are as many times larger than the image as the kernel has taps. They are made for so many samples at a time
# that they take about as much as a cache holds; those of a single sample may take more, up to the limit.
WORKSPACE = 8 * 2**20
WORKSPACE_LIMIT = 128 * 2**20
# So many places of one image make a matrix that is quick to multiply.
WIDE = 128


class View:
    """The sizes of a task, and its tensors seen as matrices. `apart` images of a sample count as so many samples."""

    def __init__(self, task: Task, apart: int = 1) -> None:
        product = task.contraction
        self.geometry = product.geometry
        self.groups = product.geometry.groups
        self.N, self.C, *image = product.image[0] // apart, *product.image[1:]
        self.O, self.c, *kernel = product.kernel
        self.o = self.O // self.groups
        self.image, self.kernel, self.response = tuple(image), tuple(kernel), product.response[2:]
        self.taps, self.places = prod(kernel), self.N * prod(self.response)

    def kernel_matrix(self, kernel: Tensor) -> Tensor:
        """[B (g o) c *] -> [B g, o, (c k)]"""
        return kernel.reshape(-1, self.o, self.c * self.taps)

    def response_matrix(self, response: Tensor) -> Tensor:
        """[B N (g o) *] -> [B g, o, (N l)]"""
        return contiguous(response.transpose(1, 2)).view(-1, self.o, self.places)

    def response_from(self, matrix: Tensor) -> Tensor:
        """[B g, o, (N l)] -> [B N (g o) *]"""
        return matrix.reshape(-1, self.O, self.N, *self.response).transpose(1, 2)

    def padded(self, image: Tensor) -> Tensor:
        """[B N C *] -> [B C N *], with the padding around it"""
        image = image.transpose(1, 2)
        if not any(self.geometry.padding):
            return image
        return F.pad(image, [p for p in reversed(self.geometry.padding) for _ in range(2)])

    def unpadded(self, image: Tensor) -> Tensor:
        """[B C N *] -> [B N C *], without the padding"""
        for axis, (padding, size) in enumerate(zip(self.geometry.padding, self.image, strict=True), 3):
            image = image.narrow(axis, padding, size)
        return image.transpose(1, 2)

    def read_by_tap(self, padded: Tensor) -> Iterator[Tensor]:
        """For each tap of the kernel, what it sees of the image: views [B C N *]."""
        for tap in all_combinations(*map(range, self.kernel)):
            view = padded
            for axis, offset in enumerate(tap):
                stride, start = self.geometry.stride[axis], offset * self.geometry.dilation[axis]
                stop = start + (self.response[axis] - 1) * stride + 1
                view = view[(slice(None),) * (3 + axis) + (slice(start, stop, stride),)]
            yield view

    def patches(self, image: Tensor) -> Tensor:
        """[B N C *] -> [B g, (c k), (N l)]"""
        padded = self.padded(image)
        batch, channels, number, *space = padded.stride()
        taps = [step * dilation for step, dilation in zip(space, self.geometry.dilation, strict=True)]
        places = [step * stride for step, stride in zip(space, self.geometry.stride, strict=True)]
        overlapping = padded.as_strided(
            (image.shape[0], self.C, *self.kernel, self.N, *self.response),
            (batch, channels, *taps, number, *places),
            padded.storage_offset(),
        )
        return contiguous(overlapping).view(-1, self.c * self.taps, self.places)

    def add_patches(self, matrix: Tensor, padded: Tensor) -> None:
        """[B g, (c k), (N l)] added up into the padded image [B C N *]"""
        parts = matrix.reshape(-1, self.C, self.taps, self.N, *self.response).unbind(2)
        for part, target in zip(parts, self.read_by_tap(padded), strict=True):
            target.add_(part)

    def blank(self, wanted: Role, like: Tensor, batch: int, bias: Tensor | None) -> Tensor:
        """To write a result into: [B g o (c k)], [B g o (N l)], or an image to add to."""
        if wanted is Role.IMAGE:
            return self.blank_image(like, batch, bias)
        columns = self.c * self.taps if wanted is Role.KERNEL else self.places
        return new_empty(like, (batch, self.groups, self.o, columns))

    def finished(self, wanted: Role, result: Tensor) -> Tensor:
        """What was written, with the axes of its role."""
        if wanted is Role.IMAGE:
            return self.unpadded(result)
        if wanted is Role.KERNEL:
            return result.reshape(-1, self.O, self.c, *self.kernel)
        return self.response_from(result)

    def blank_image(self, like: Tensor, batch: int, bias: Tensor | None) -> Tensor:
        """A padded image [B C N *] to add to, which holds the bias already."""
        size = [n + 2 * p for n, p in zip(self.image, self.geometry.padding, strict=True)]
        blank = new_zeros(like, (batch, self.C, self.N, *size))
        return blank if bias is None else blank.add_(bias.reshape(batch, self.C, *[1] * (1 + len(size))))


class Unfold(Algorithm):
    """Lay out patches, a bounded number of samples at a time, and multiply."""

    name = "unfold"
    keeps_memory = True

    def applies(self, task: Task) -> bool:
        usable = task.both_mapped and task.may_write and not is_pointwise(task) and not task.is_empty
        return usable and self._per_sample(task) <= WORKSPACE_LIMIT

    def workspace(self, task: Task) -> int:
        return self._samples_at_once(task) * self._per_sample(task)

    def traffic(self, task: Task) -> int:
        return task.batch * self._per_sample(task)

    def run(self, task: Task, first: Operand, second: Operand, bias: Mapped | None) -> Mapped:
        wanted, apart = task.contraction.wanted, _apart(task)
        view = View(task, apart)
        biases = None if bias is None else spread(bias, task.batch).value.repeat_interleave(apart, 0)
        result = view.blank(wanted, first.value, task.batch * apart, biases)
        at_once = self._samples_at_once(task)
        firsts, seconds = (each.in_front().split(at_once) for each in (first, second))
        targets = result.split(at_once * apart)
        parts = [None] * len(targets) if biases is None else biases.split(at_once * apart)
        for a, b, target, part in zip(firsts, seconds, targets, parts, strict=True):
            if apart > 1:
                a, b = a.flatten(0, 1).unsqueeze(1), b.repeat_interleave(apart, 0)
            multiply(view, wanted, a, b, part, target)
        return Mapped(view.finished(wanted, result).reshape(task.batch, *task.contraction.shape(wanted)), 0)

    @staticmethod
    def _per_sample(task: Task) -> int:
        view = View(task)
        return view.C * view.taps * view.places * task.itemsize

    def _samples_at_once(self, task: Task) -> int:
        return max(1, min(task.batch, WORKSPACE // max(1, self._per_sample(task))))


def _apart(task: Task) -> int:
    """As how many samples the images of one are multiplied: alone, they and their responses stay where they are.

    A kernel's gradient is a sum over them all, and small ones make a matrix of a good size only side by side.
    """
    N, _, *size = task.contraction.response
    return 1 if task.contraction.wanted is Role.KERNEL or prod(size) < WIDE else N


class Taps(Algorithm):
    """One matrix product for every tap of the kernel: no patches, but the result is visited as often."""

    name = "taps"
    keeps_memory = True

    def applies(self, task: Task) -> bool:
        several = prod(task.contraction.kernel[2:]) > 1
        return task.both_mapped and task.may_write and several and not task.is_empty

    def workspace(self, task: Task) -> int:
        return task.result_bytes

    def traffic(self, task: Task) -> int:
        # What a tap sees of the image, and what comes of it.
        view = View(task)
        seen = task.batch * view.C * view.places * task.itemsize
        return view.taps * (seen + task.result_bytes)

    def run(self, task: Task, first: Operand, second: Operand, bias: Mapped | None) -> Mapped:
        view, wanted = View(task), task.contraction.wanted
        a, b = first.in_front(), second.in_front()
        biases = None if bias is None else spread(bias, task.batch).value
        if wanted is Role.KERNEL:
            return Mapped(self._kernel(view, a, b), 0)
        kernels = view.kernel_matrix(b).reshape(-1, view.o, view.c, view.taps).movedim(-1, 0).contiguous()
        if wanted is Role.RESPONSE:
            return Mapped(self._response(view, a, kernels, biases), 0)
        image = view.blank_image(a, task.batch, biases)
        response = view.response_matrix(a)
        for tap, target in zip(kernels, view.read_by_tap(image), strict=True):
            target.add_(torch.bmm(tap.transpose(1, 2), response).view_as(target))
        return Mapped(view.unpadded(image), 0)

    @staticmethod
    def _response(view: View, image: Tensor, kernels: Tensor, biases: Tensor | None) -> Tensor:
        total = new_zeros(image, (kernels.shape[1], view.o, view.places))
        if biases is not None:
            total.add_(biases.reshape(-1, view.o, 1))
        for tap, seen in zip(kernels, view.read_by_tap(view.padded(image)), strict=True):
            total.baddbmm_(tap, seen.reshape(-1, view.c, view.places))
        return view.response_from(total)

    @staticmethod
    def _kernel(view: View, image: Tensor, response: Tensor) -> Tensor:
        response_matrix = view.response_matrix(response)
        by_tap = new_empty(image, (view.taps, response_matrix.shape[0], view.o, view.c))
        for target, seen in zip(by_tap.unbind(), view.read_by_tap(view.padded(image)), strict=True):
            torch.bmm(response_matrix, seen.reshape(-1, view.c, view.places).transpose(1, 2), out=target)
        return contiguous(by_tap.movedim(0, -1)).reshape(-1, view.O, view.c, *view.kernel)


def multiply(view: View, wanted: Role, first: Tensor, second: Tensor, bias: Tensor | None, result: Tensor) -> None:
    """The contraction by patches, written into a part of `View.blank`; the operands have B in front."""
    if wanted is Role.KERNEL:
        patches = view.patches(first).transpose(1, 2)
        torch.bmm(view.response_matrix(second), patches, out=result.flatten(0, 1))
        return
    kernel = view.kernel_matrix(second)
    if wanted is Role.IMAGE:
        parts = new_empty(first, (kernel.shape[0], kernel.shape[2], view.places))
        torch.bmm(kernel.transpose(1, 2), view.response_matrix(first), out=parts)
        view.add_patches(parts, result)
        return
    torch.bmm(kernel, view.patches(first), out=result.flatten(0, 1))
    if bias is not None:
        result.add_(bias.reshape(-1, view.groups, view.o, 1))
