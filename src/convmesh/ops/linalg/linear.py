"""Linear layers over the last dimension of tensors that are sharded along dimensions before it.

torch flattens those dimensions into one, and a sharded inner dimension is not a Shard of the flattened one. So a linear
layer stays one operator, and autograd records it as one: every rank flattens its own local tensor.

Compilers, function transforms and double backward do not support that operator. For them it is a convolution with
kernel size 1, whose rules know all placements, on a channels_last view: no copy is made, and the product is the same.
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
    """`[... I] [O I] [O] -> [... O]`"""
    if _is_supported(input, weight, bias):
        return _linear_or_convolution(input, weight, bias)
    result: torch.Tensor = _torch.composite(aten.linear.default, (input, weight, bias), {})
    return result


@composite("matmul", LINEAR)
def matmul(input: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """A product with a 2-d second operand is a linear layer; all others are left to torch."""
    if _is_supported(input, other, None):
        return _linear_or_convolution(input, other.t(), None)
    result: torch.Tensor = _torch.composite(aten.matmul.default, (input, other), {})
    return result


def _is_supported(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> bool:
    """Whether a linear layer is computed by `_linear_or_convolution`, rather than by torch's decomposition."""
    placed = all(tensor is None or isinstance(tensor, DTensor) for tensor in (input, weight, bias))
    if not placed or weight.dim() != 2 or not input.dtype.is_floating_point:
        return False
    if 0 in input.shape or 0 in weight.shape:
        return False  # a convolution has no output of size 0
    return input.dim() in (3, 4, 5)  # a plain matrix has a rule of its own


def _linear_or_convolution(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Compute a linear layer as one operator or, where autograd cannot record that, as a convolution."""
    input, weight = input.resolve_neg(), weight.resolve_neg()  # an operator that is recorded as one reads raw storage
    if _torch.records_whole():
        result: torch.Tensor = _torch.recorded(aten.linear.default, (input, weight, bias))
        return result
    input = input.contiguous()  # as one device does, so that gradients have the same strides
    kernel, images = _as_kernel(weight, input.dim()), _as_images(input)
    output = torch.convolution(images, kernel, bias, *_geometry(images))
    # A convolution keeps its input's memory format, a linear layer does not: its users view the result.
    return _as_features(output, input.dim()).contiguous()


def _as_images(input: torch.Tensor) -> torch.Tensor:
    """`[N ... I] -> [N I ...]`, with at least two spatial dimensions."""
    input = input.unsqueeze(1) if input.dim() < 4 else input
    return input.permute(0, input.dim() - 1, *range(1, input.dim() - 1))


def _as_features(images: torch.Tensor, dims: int) -> torch.Tensor:
    """`[N O ...] -> [N ... O]`: the inverse of `_as_images`, for a tensor of `dims` dimensions."""
    features = images.permute(0, *range(2, images.dim()), 1)
    return features.squeeze(1) if dims < 4 else features


def _as_kernel(weight: torch.Tensor, dims: int) -> torch.Tensor:
    """`[O I] -> [O I 1 1 ...]`"""
    return weight.view(*weight.shape, *[1] * (max(4, dims) - 2))


def _geometry(images: torch.Tensor) -> tuple[Any, ...]:
    """Return stride 1, padding 0, dilation 1, not transposed, output padding 0, one group."""
    zeros, ones = [0] * (images.dim() - 2), [1] * (images.dim() - 2)
    return ones, zeros, ones, False, zeros, 1


@composite("linear_backward")
def linear_backward(
    input: torch.Tensor, gradient: torch.Tensor, weight: torch.Tensor, mask: list[bool]
) -> tuple[torch.Tensor | None, ...]:
    """The gradients of a linear layer.

    For a double backward they are computed as those of a convolution, because torch's own formula does not cover this.
    """
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
    """Return a check that no dimension shorter than the number of ranks becomes sharded: some ranks would be idle."""

    def fits(assignment: Assignment) -> bool:
        wanted = input_placements(assignment, 0)
        pairs = enumerate(zip(input.placements, wanted, strict=True))
        return not any(
            isinstance(new, Shard) and old != new and input.shape[new.dim] < input.mesh.size(mesh_dim)
            for mesh_dim, (old, new) in pairs
        )

    return fits


def _check(input: Layout, weight: Layout, bias: Layout | None = None) -> None:
    """Refuse shapes and dtypes that do not fit, on all ranks: where only one adds the bias, only one would see it."""
    fitting = weight.ndim in (1, 2) and input.ndim and input.shape[-1] == weight.shape[-1]
    if not fitting or (bias is not None and bias.shape != weight.shape[:-1]):
        raise Unfit(f"an input of shape {tuple(input.shape)} and a weight of shape {tuple(weight.shape)}"
                    + (f", with a bias of shape {tuple(bias.shape)}" if bias is not None else ""),
                    "give an input (*, I), a weight (O, I) and a bias (O)")  # fmt: skip
    if len({one.dtype for one in (input, weight, bias) if one is not None}) > 1:
        raise Unfit("the dtypes differ", "give an input, a weight and a bias of one dtype")


@plan_rule(aten.linear.default, behaviour=LINEAR)
def linear_forward(operator: _torch.Operator, input: Layout, weight: Layout, bias: Layout | None) -> Call | None:
    """Plan the forward pass. Where the output is Partial(sum), only one rank adds the bias."""
    _check(input, weight, bias)
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
    held = prod(input.shape[:-1]) * prod(features) / prod(len(input.shards(dim)) for dim in range(last))

    def reduced(row: Row, mesh_dim: int) -> float:
        """A Partial result is reduced by what comes next. Of weights that are sharded nobody wants anything else."""
        ranks, sums = input.mesh.size(mesh_dim), row.name == "input features" and weight.placements[mesh_dim] == R
        return 2 * held * (ranks - 1) / ranks if sums else 0.0

    named = (("input", input), ("weight", weight), ("bias", bias))
    chosen = choose("linear", rows, named, fits=_fits(input), extra=reduced)
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
    preferences = [
        Wanted(result.placements, prod(result.shape), or_sharded=number > 0) if mask[number] else None
        for number, result in enumerate(results)
    ]
    named = (("input", input), ("grad_output", gradient), ("weight", weight))
    chosen = choose("linear_backward", rows, named, preferences, fits=_fits(input))
    moved: list[Moved | None] = []
    for number, (result, preferred) in enumerate(zip(results, preferences, strict=True)):
        at = output_placements(chosen, number)
        wanted = at if preferred is None else tuple(preferred.becomes(*entry) for entry in enumerate(at))
        moved.append(None if preferred is None else Moved(result.placed(at), result.placed(wanted)))
    operands = [one.placed(input_placements(chosen, number)) for number, (_, one) in enumerate(named)]
    for_input, for_weight, for_bias = mask

    def run(x: torch.Tensor, gy: torch.Tensor, w: torch.Tensor, _: Any) -> tuple[torch.Tensor | None, ...]:
        """`[... I] [... O] [O I] -> [... I] [O I] [O]`"""
        count = prod(gy.shape[:-1])  # -1 would be ambiguous where a rank has no features
        flat = gy.reshape(count, gy.shape[-1])
        gx = flat.mm(w).view(x.shape) if for_input else None
        gw = flat.t().mm(x.reshape(count, x.shape[-1])) if for_weight else None
        return gx, gw, flat.sum(0) if for_bias else None

    return Call(operands, moved, run)
