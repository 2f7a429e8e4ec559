"""All samples with a compiled kernel for CPUs, which reads operands with any strides, and writes only the result.

It reorders no operands, so small convolutions cost little more than their arithmetic.
"""

from __future__ import annotations

from math import prod
from typing import NamedTuple

from torch import Tensor

from .. import kernels
from ..kernels.memory import contiguous, new_empty
from ._functorch import Nature
from .algorithms import Algorithm, Task, spread
from .contraction import Role
from .folding import Mapped, Operand
from .patches import WORKSPACE_LIMIT

# Bytes that one image may be transformed into.
NUMBERS_LIMIT = 16 * 2**20
LANES = 16  # of the longest vectors, which channels fill up


class Prepared(NamedTuple):
    """Prepared for operands with known strides: which have to be copied, and the kernel."""

    copies: tuple[bool, bool]
    compute: kernels.Prepared


class Direct(Algorithm):
    name = "direct"

    def applies(self, task: Task) -> bool:
        plain = task.nature is Nature.PLAIN and task.device == "cpu" and task.dtype in ("float32", "float64")
        fits = any(task.mapped) and not task.is_empty and len(task.contraction.image) <= 5
        return plain and fits and self.workspace(task) <= WORKSPACE_LIMIT and task.machine.has_kernels()

    def workspace(self, task: Task) -> int:
        """Return the bytes per thread: a padded image, and packed columns of the other operand."""
        product = task.contraction
        sizes = zip(product.image[2:], product.geometry.padding, product.kernel[2:], strict=True)
        image = prod(size + 2 * padding + taps for size, padding, taps in sizes)
        channels = max(product.image[1], product.response[1]) // product.geometry.groups
        columns = max(prod(product.response[2:]), prod(product.kernel[1:]))
        return task.threads * task.itemsize * (image * channels + 16 * columns)

    def run(self, task: Task, first: Operand, second: Operand, bias: Mapped | None) -> Mapped:
        result = new_empty(first.value, (task.batch, *task.contraction.shape(task.contraction.wanted)))
        biases = None if bias is None else contiguous(spread(bias, task.batch).value)
        lies = (
            self.name,
            first.value.stride(),
            first.mapped.dim,
            second.value.stride(),
            second.mapped.dim,
            bias is None,
        )
        if lies not in task.prepared:
            task.prepared[lies] = self._prepare(task, first, second, bias, result, biases)
        copies, compute = task.prepared[lies]
        a, b = (_dense(each) if copy else each.value for each, copy in zip((first, second), copies, strict=True))
        at = {first.role: a.data_ptr(), second.role: b.data_ptr()}
        image, kernel, response = (
            at.get(role) or result.data_ptr() for role in (Role.IMAGE, Role.KERNEL, Role.RESPONSE)
        )
        compute(image, kernel, response, None if biases is None else biases.data_ptr(), task.threads)
        return Mapped(result, 0)

    def _prepare(
        self, task: Task, first: Operand, second: Operand, bias: Mapped | None, result: Tensor, biases: Tensor | None
    ) -> Prepared:
        wanted, copies = task.contraction.wanted, (not _is_readable(first), not _is_readable(second))
        tensors = {wanted: result}
        for each, copy in zip((first, second), copies, strict=True):
            value = _dense(each) if copy else each.in_front() if each.is_mapped else each.value
            tensors[each.role] = value if each.is_mapped else value.expand(task.batch, *value.shape)
        steps = kernels.Steps(tensors[Role.IMAGE], tensors[Role.KERNEL], tensors[Role.RESPONSE], biases)
        if not second.is_mapped and second.role is Role.KERNEL and (bias is None or bias.dim is None):
            steps = _as_one_sample(steps)
        product = kernels.Product(wanted.name.lower(), len(steps.image), task.contraction.geometry, self.name)
        return Prepared(copies, kernels.prepare(product, steps))


class Winograd(Direct):
    """Winograd's algorithm, for 3 x 3 kernels with stride 1; in 3-d, the first dimension may have any kernel size.

    It needs fewer multiplications, but has about twice the rounding error, and gives NaN where direct convolution gives
    an infinite value. So it is for float32 only, and not used with `exact`.
    """

    name = "winograd"

    def applies(self, task: Task) -> bool:
        usable = task.dtype == "float32" and not task.exact and _is_winograds(task)
        return usable and super().applies(task) and self._numbers(task) <= NUMBERS_LIMIT

    def _numbers(self, task: Task) -> int:
        """Return the bytes of one transformed image."""
        product = task.contraction
        channels = max(product.image[1], product.response[1]) // product.geometry.groups
        channels = -(-channels // LANES) * LANES
        *depth, h, w = (max(sizes) for sizes in zip(product.image[2:], product.response[2:], strict=True))
        return task.itemsize * channels * (prod(depth) + 2) * (h + 2) * (w + 2) * 4

    def workspace(self, task: Task) -> int:
        product = task.contraction
        columns = 16 * 32 * max(prod(product.response[2:]), prod(product.kernel[1:]))
        sums = 16 * prod(product.kernel[:-2])
        if not task.mapped[0]:  # those of all samples at once, which threads share
            sums = max(sums, sums * task.batch // task.threads)
        return task.threads * (2 * self._numbers(task) + task.itemsize * (columns + sums))


def _is_winograds(task: Task) -> bool:
    product, geometry = task.contraction, task.contraction.geometry
    taps = product.kernel[2:]
    return (
        len(taps) > 1
        and taps[-2:] == (3, 3)
        and {*geometry.stride, *geometry.dilation} == {1}
        and all(padding < size for padding, size in zip(geometry.padding, taps, strict=True))
    )


def _as_one_sample(steps: kernels.Steps) -> kernels.Steps:
    """`[B N ...] -> [1 (B N) ...]` if kernels are the same for all samples: they are then read only once."""
    image, kernel, response, bias = steps
    even = all(each.shape[1] == 1 or each.stride(0) == each.shape[1] * each.stride(1) for each in (image, response))
    if not even:
        return steps
    images, responses = (each.flatten(0, 1).unsqueeze(0) for each in (image, response))
    return kernels.Steps(images, kernel[:1], responses, None if bias is None else bias[:1])


def _is_readable(operand: Operand) -> bool:
    """Whether a tensor is contiguous along the dimensions that are read as vectors."""
    value, outer = (operand.in_front(), 1) if operand.is_mapped else (operand.value, 0)
    outer += 1 if operand.role is Role.KERNEL else 2
    return value[(0,) * outer].is_contiguous()


def _dense(operand: Operand) -> Tensor:
    return contiguous(operand.in_front() if operand.is_mapped else operand.value)
