"""Linear layers over the last dimension of tensors with sharded dimensions before it.

torch flattens those dimensions into one, and what a sharded inner dimension becomes there is no Shard of it. So a
linear layer stays one operator, and autograd records it as one: every rank flattens its own local tensor.

Compilers, transforms and derivatives of gradients do not know it as one. For them it is a convolution with a kernel of
1, whose rules know all placements, on a channels_last view, which costs no copy and computes the same product.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from ... import _torch
from ...sharding.call import Call, Moved
from ...sharding.errors import Unfit
from ...sharding.layout import Layout
from ...sharding.plan_rule import plan_rule
from ...sharding.registry import Behaviour, composite
from ...sharding.sharding_table import Assignment, P, R, Row, Shard, Wanted, choose, input_placements, output_placements

aten = torch.ops.aten

LINEAR = Behaviour("all dimensions before the last, features in and out, Partial(sum)", "nothing")


@composite("linear")
def linear(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """[... I] [O I] [O] -> [... O]"""
    if _is_pointwise(input, weight, bias):
        return _pointwise(input, weight, bias)
    result: torch.Tensor = _torch.composite(aten.linear.default, (input, weight, bias), {})
    return result


@composite("matmul", LINEAR)
def matmul(input: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """A product with a matrix is a linear layer; any other is left to torch."""
    if _is_pointwise(input, other, None):
        return _pointwise(input, other.t(), None)
    result: torch.Tensor = _torch.composite(aten.matmul.default, (input, other), {})
    return result


def _is_pointwise(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> bool:
    placed = all(tensor is None or isinstance(tensor, DTensor) for tensor in (input, weight, bias))
    if not placed or weight.dim() != 2 or not input.dtype.is_floating_point:
        return False
    if 0 in input.shape or 0 in weight.shape:
        return False  # a convolution has no output of size 0
    return input.dim() in (3, 4, 5)  # a plain matrix has a rule of its own


def _pointwise(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    input, weight = input.resolve_neg(), weight.resolve_neg()  # what is recorded whole is seen as it is in memory
    if _torch.records_whole():
        result: torch.Tensor = _torch.recorded(aten.linear.default, (input, weight, bias))
        return result
    input = input.contiguous()  # as one device makes it, so that gradients have its strides
    kernel, images = _as_kernel(weight, input.dim()), _as_images(input)
    output = torch.convolution(images, kernel, bias, *_geometry(images))
    # A convolution keeps the order of its input in memory, and a linear layer does not: others view what it returns.
    return _as_features(output, input.dim()).contiguous()


def _as_images(input: torch.Tensor) -> torch.Tensor:
    """[N ... I] -> [N I ...], with two dimensions of space at least."""
    input = input.unsqueeze(1) if input.dim() < 4 else input
    return input.permute(0, input.dim() - 1, *range(1, input.dim() - 1))


def _as_features(images: torch.Tensor, dims: int) -> torch.Tensor:
    features = images.permute(0, *range(2, images.dim()), 1)
    return features.squeeze(1) if dims < 4 else features


def _as_kernel(weight: torch.Tensor, dims: int) -> torch.Tensor:
    return weight.view(*weight.shape, *[1] * (max(4, dims) - 2))


def _geometry(images: torch.Tensor) -> tuple[Any, ...]:
    zeros, ones = [0] * (images.dim() - 2), [1] * (images.dim() - 2)
    return ones, zeros, ones, False, zeros, 1


@composite("linear_backward")
def linear_backward(
    input: torch.Tensor, gradient: torch.Tensor, weight: torch.Tensor, mask: list[bool]
) -> tuple[torch.Tensor | None, ...]:
    """Where it is derived once more, by the convolution's, of which torch's own formula knows nothing."""
    derived = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (input, gradient, weight))
    if not derived:
        plain: tuple[torch.Tensor | None, ...] = _torch.recorded(
            aten.linear_backward.default, (input, gradient, weight, mask)
        )
        return plain
    images, kernel = _as_images(input), _as_kernel(weight, input.dim())
    gx, gw, gb = aten.convolution_backward.default(
        _as_images(gradient), images, kernel, [weight.shape[0]], *_geometry(images), mask
    )
    return _as_features(gx, input.dim()) if mask[0] else None, gw.view(weight.shape) if mask[1] else None, gb


def _fits(input: Layout) -> Callable[[Assignment], bool]:
    """A dimension of fewer indices than ranks is not sharded anew: some ranks would be idle."""

    def fits(assignment: Assignment) -> bool:
        wanted = input_placements(assignment, 0)
        pairs = enumerate(zip(input.placements, wanted, strict=True))
        return not any(
            isinstance(new, Shard) and old != new and input.shape[new.dim] < input.mesh.size(mesh_dim)
            for mesh_dim, (old, new) in pairs
        )

    return fits


def _check(input: Layout, weight: Layout) -> None:
    if weight.ndim not in (1, 2) or not input.ndim or input.shape[-1] != weight.shape[-1]:
        raise Unfit(f"an input of shape {tuple(input.shape)} and a weight of shape {tuple(weight.shape)}",
                    "give an input (*, I) and a weight (O, I)")  # fmt: skip


@plan_rule(aten.linear.default, behaviour=LINEAR)
def linear_forward(operator: _torch.Operator, input: Layout, weight: Layout, bias: Layout | None) -> Call | None:
    """Where the output is Partial(sum), one rank only adds the bias."""
    _check(input, weight)
    last, features = input.ndim - 1, weight.shape[:-1]
    rows = [
        Row("replicated", (R, R, R), (R,)),
        *[Row("before the last", (Shard(dim), R, R), (Shard(dim),)) for dim in range(last)],
        Row("sum of inputs", (P, R, R), (P,)),
        Row("sum of weights", (R, P, R), (P,)),
        Row("input features", (Shard(last), Shard(weight.ndim - 1), R), (P,)),
    ]
    if features:
        rows.insert(-1, Row("output features", (R, Shard(0), Shard(0)), (Shard(last),)))
    named = (("input", input), ("weight", weight), ("bias", bias))
    chosen = choose("linear", rows, named, fits=_fits(input))
    output = input.new((*input.shape[:-1], *features), output_placements(chosen, 0))
    operands = [one and one.placed(input_placements(chosen, number)) for number, (_, one) in enumerate(named)]
    adds = output.adds_once
    return Call(operands, output, lambda x, w, b: operator(x, w, b if adds else None))


@plan_rule(aten.linear_backward.default, behaviour=LINEAR)
def linear_gradients(
    operator: _torch.Operator, input: Layout, gradient: Layout, weight: Layout, mask: tuple[bool, ...]
) -> Call:
    _check(input, weight)
    last = input.ndim - 1
    rows = [
        Row("replicated", (R, R, R), (R, R, R)),
        *[Row("before the last", (Shard(dim), Shard(dim), R), (Shard(dim), P, P)) for dim in range(last)],
        Row("sum of gradients", (R, P, R), (P, P, P)),
        Row("sum of inputs", (P, R, R), (R, P, R)),
        Row("sum of weights", (R, R, P), (P, R, R)),
        Row("output features", (R, Shard(last), Shard(0)), (P, Shard(0), Shard(0))),
        Row("input features", (Shard(last), R, Shard(1)), (Shard(last), Shard(1), R)),
    ]
    bias = tuple(Shard(0) if p == Shard(0) else R for p in weight.placements)
    results = [input.new(input.shape), weight.dense, weight.new(weight.shape[:1], bias)]
    wishes = [
        Wanted(result.placements, prod(result.shape), or_sharded=number > 0) if mask[number] else None
        for number, result in enumerate(results)
    ]
    named = (("input", input), ("grad_output", gradient), ("weight", weight))
    chosen = choose("linear_backward", rows, named, wishes, fits=_fits(input))
    moved: list[Moved | None] = []
    for number, (result, wish) in enumerate(zip(results, wishes, strict=True)):
        at = output_placements(chosen, number)
        goes = at if wish is None else tuple(wish.becomes(*entry) for entry in enumerate(at))
        moved.append(None if wish is None else Moved(result.placed(at), result.placed(goes)))
    operands = [one.placed(input_placements(chosen, number)) for number, (_, one) in enumerate(named)]
    for_input, for_weight, for_bias = mask

    def run(x: torch.Tensor, gy: torch.Tensor, w: torch.Tensor, _: Any) -> tuple[torch.Tensor | None, ...]:
        """[... I] [... O] [O I] -> [... I] [O I] [O]"""
        count = prod(gy.shape[:-1])  # which -1 would leave open where a rank has no features
        flat = gy.reshape(count, gy.shape[-1])
        gx = flat.mm(w).view(x.shape) if for_input else None
        gw = flat.t().mm(x.reshape(count, x.shape[-1])) if for_weight else None
        return gx, gw, flat.sum(0) if for_bias else None

    return Call(operands, moved, run)
