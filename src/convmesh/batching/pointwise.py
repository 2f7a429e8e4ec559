"""Kernels of one tap, both operands mapped: products of matrices as they lie in memory, nothing is laid out.

With l the places that the kernel reads,
    [B o c] [B N c l]   -> [B N o l]   the response
    [B c o] [B N o l]   -> [B N c l]   the image
    [B N o l] [B N c l] -> [B o c]     the kernel, summed over N.
"""

from __future__ import annotations

from math import prod

import torch
from torch import Tensor

from ._functorch import Nature
from .algorithms import Algorithm, Task, spread
from .contraction import Role
from .folding import Mapped, Operand
from .memory import new_empty


class Pointwise(Algorithm):
    name = "pointwise"
    keeps_memory = True

    def applies(self, task: Task) -> bool:
        usable = task.may_write or task.nature is Nature.TRACKED
        return task.both_mapped and usable and is_pointwise(task) and not task.is_empty

    def run(self, task: Task, first: Operand, second: Operand, bias: Mapped | None) -> Mapped:
        product = task.contraction
        activation = _seen(task, first.in_front()).flatten(3)
        if product.wanted is Role.KERNEL:
            add_up = _sum_of_products if task.may_write else _differentiable_sum
            result = add_up(second.in_front().flatten(3), activation)
        else:
            kernel = second.in_front().flatten(2)
            matrices = kernel if product.wanted is Role.RESPONSE else kernel.mT
            result = _products(matrices, activation) if task.may_write else matrices.unsqueeze(1) @ activation
        if bias is not None:
            result = result + spread(bias, task.batch).value.reshape(task.batch, 1, -1, 1)
        return Mapped(result.reshape(task.batch, *product.shape(product.wanted)), 0)


def is_pointwise(task: Task) -> bool:
    """One tap, and a result of which every place is written."""
    product = task.contraction
    one_tap = prod(product.kernel[2:]) == 1 and product.geometry.groups == 1 and not any(product.geometry.padding)
    return one_tap and (product.wanted is not Role.IMAGE or product.image[2:] == product.response[2:])


def _seen(task: Task, first: Tensor) -> Tensor:
    """Of an image, what a kernel with strides sees; a response is seen whole."""
    product = task.contraction
    if product.wanted is Role.IMAGE:
        return first
    for axis, (stride, size) in enumerate(zip(product.geometry.stride, product.response[2:], strict=True), 3):
        first = first[(slice(None),) * axis + (slice(0, (size - 1) * stride + 1, stride),)]
    return first


def _products(matrices: Tensor, activation: Tensor) -> Tensor:
    """[B r s] [B N s l] -> [B N r l]"""
    batch, N, _, places = activation.shape
    result = new_empty(activation, (batch, N, matrices.shape[1], places))
    if N == 1:
        torch.bmm(matrices, activation.squeeze(1), out=result.squeeze(1))
        return result
    # Sample by sample: a product is written where it belongs only if its matrices lie one behind the other there.
    for target, matrix, factor in zip(result, matrices, activation, strict=True):
        torch.bmm(matrix.expand(N, -1, -1), factor, out=target)
    return result


def _sum_of_products(response: Tensor, image: Tensor) -> Tensor:
    """[B N o l] [B N c l] -> [B o c]"""
    result = new_empty(image, (image.shape[0], response.shape[2], image.shape[2]))
    for n, (g, x) in enumerate(zip(response.unbind(1), image.unbind(1), strict=True)):
        torch.baddbmm(result, g, x.mT, beta=int(n > 0), out=result)
    return result


def _differentiable_sum(response: Tensor, image: Tensor) -> Tensor:
    return torch.bmm(response.transpose(1, 2).flatten(2), image.transpose(1, 2).flatten(2).mT)
