"""Elementwise activations with several results or parameters: PReLU's gradient, log-sigmoid, GLU.

GLU has one input but reads it twice.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from ... import _torch
from ...sharding.errors import Unfit
from ...sharding.layout import Layout
from ...sharding.plan_rule import Made, plan_rule
from ...sharding.registry import Behaviour
from ...sharding.sharding_table import R, Row, elementwise_rows
from ...sharding.table_rule import table_rule

aten = torch.ops.aten

ELEMENTWISE = Behaviour("all dimensions", "nothing; Partial operands are reduced")
GLU = Behaviour(
    "all dimensions", "nothing; elements that change owner if the halved dimension is sharded",
    "a halved dimension of odd size",
)  # fmt: skip


@table_rule(aten._prelu_kernel_backward.default, behaviour=ELEMENTWISE)
def prelu_backward(grad_output: Layout, input: Layout, weight: Layout) -> Iterable[Row]:
    """Both gradients have the input's shape: torch itself sums the weight's over its broadcast dimensions."""
    return elementwise_rows((grad_output, input, weight), results=2)


@table_rule(aten.log_sigmoid_forward.default, behaviour=ELEMENTWISE)
def log_sigmoid(input: Layout) -> Iterable[Row]:
    """The second result is torch's own buffer for the gradient: only some devices use it, others leave it empty."""
    return elementwise_rows((input,), results=2)


@table_rule(aten.log_sigmoid_backward.default, behaviour=ELEMENTWISE)
def log_sigmoid_backward(grad_output: Layout, input: Layout, buffer: Layout) -> Iterable[Row]:
    for row in elementwise_rows((grad_output, input)):
        used = buffer.shape == input.shape
        yield Row(row.name, (*row.inputs, row.inputs[1] if used else R), row.outputs)


def _halves(input: DTensor, dim: int) -> tuple[DTensor, DTensor]:
    """Return both halves of the input along `dim`."""
    half = input.shape[dim] // 2
    return aten.slice.Tensor(input, dim, 0, half), aten.slice.Tensor(input, dim, half, 2 * half)


def _check(input: Layout, dim: int) -> None:
    if not -max(1, input.ndim) <= dim < max(1, input.ndim):
        raise Unfit(f"the input has no dimension {dim}", "give a dimension that it has")
    size = input.shape[dim] if input.shape else 1
    if size % 2:
        raise Unfit(f"dimension {dim} has {size} indices", "give an even number")


@plan_rule(aten.glu.default, behaviour=GLU)
def glu(operator: _torch.Operator, input: Layout, dim: int) -> Made:
    _check(input, dim)
    return _glu


def _glu(input: DTensor, dim: int) -> Any:
    first, second = _halves(input, dim)
    return aten.mul.Tensor(first, aten.sigmoid.default(second))


@plan_rule(aten.glu_backward.default, behaviour=GLU)
def glu_backward(operator: _torch.Operator, gradient: Layout, input: Layout, dim: int) -> Made:
    _check(input, dim)
    return _glu_backward


def _glu_backward(gradient: DTensor, input: DTensor, dim: int) -> Any:
    first, second = _halves(input, dim)
    open_gate = aten.sigmoid.default(second)
    by_gate = aten.sigmoid_backward.default(aten.mul.Tensor(gradient, first), open_gate)
    return aten.cat.default([aten.mul.Tensor(gradient, open_gate), by_gate], dim)
