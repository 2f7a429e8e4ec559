"""Activations that are elementwise and yet have more than one result, or read their input twice."""

from __future__ import annotations

from typing import Any

import torch

from ... import _torch
from ...sharding.errors import refuse
from ...sharding.redistribute import check_placed
from ...sharding.registry import Behaviour, rule

aten = torch.ops.aten

LOG_SIGMOID = Behaviour("all dimensions", "nothing; pending sums are reduced")
GLU = Behaviour(
    "all dimensions", "nothing; what changes its owner if the halved dimension is sharded",
    "an odd number of what is halved",
)  # fmt: skip


@rule(aten.log_sigmoid_forward.default, behaviour=LOG_SIGMOID)
def log_sigmoid(operator: _torch.Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The second result is torch's own, for the gradient: only some devices use it, others leave it empty."""
    (input,) = args
    buffer = aten.exp.default(aten.neg.default(aten.abs.default(input)))
    return aten.sub.Tensor(aten.clamp_max.default(input, 0), aten.log1p.default(buffer)), buffer


@rule(aten.log_sigmoid_backward.default, behaviour=LOG_SIGMOID)
def log_sigmoid_backward(operator: _torch.Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    gradient, input, _ = args
    return aten.mul.Tensor(gradient, aten.sigmoid.default(aten.neg.default(input)))


def _halves(operator: str, input: Any, dim: int) -> Any:
    check_placed(operator, (("input", input),))
    size = int(input.shape[dim]) if input.dim() else 1
    if size % 2:
        raise refuse(operator, f"dimension {dim} has {size} indices", [("input", input)], "give an even number")
    return aten.slice.Tensor(input, dim, 0, size // 2), aten.slice.Tensor(input, dim, size // 2, size)


@rule(aten.glu.default, behaviour=GLU)
def glu(operator: _torch.Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    input, dim = _torch.arguments(operator, args, kwargs)
    first, second = _halves("glu", input, dim % max(1, input.dim()))
    return aten.mul.Tensor(first, aten.sigmoid.default(second))


@rule(aten.glu_backward.default, behaviour=GLU)
def glu_backward(operator: _torch.Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    gradient, input, dim = _torch.arguments(operator, args, kwargs)
    dim %= max(1, input.dim())
    first, second = _halves("glu_backward", input, dim)
    open_gate = aten.sigmoid.default(second)
    by_gate = aten.sigmoid_backward.default(aten.mul.Tensor(gradient, first), open_gate)
    return aten.cat.default([aten.mul.Tensor(gradient, open_gate), by_gate], dim)
