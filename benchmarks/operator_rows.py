"""The rows of the operator benchmark: one or more operators of every family, and what they are given."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Replicate, distribute_tensor

IMAGE = (2, 64, 256, 256)
CHANNELS = IMAGE[1]
Shape = tuple[int, ...]


def unpooled(x: Tensor) -> Tensor:
    values, indices = F.max_pool2d(x, 2, return_indices=True)
    return F.max_unpool2d(values, indices, 2)


def mlp(x: Tensor, weight: Tensor, bias: Tensor, up: Tensor, down: Tensor) -> Tensor:
    y = F.layer_norm(x.permute(0, 2, 3, 1), (CHANNELS,), weight, bias)
    return F.linear(F.gelu(F.linear(y, up)), down).permute(0, 3, 1, 2)


def squeeze_excite(x: Tensor, down: Tensor, up: Tensor) -> Tensor:
    gate = F.relu(F.conv2d(x.mean((2, 3), keepdim=True), down))
    return x * torch.sigmoid(F.conv2d(gate, up))


def cross_entropy(x: Tensor) -> Tensor:
    return F.cross_entropy(x, x.detach()[:, 0].abs().mul(8).long().clamp(0, CHANNELS - 1))


def joined_locally(x: Tensor) -> Tensor:
    """With slices that are new tensors, and so are those of the gradient."""
    parts = [x[..., 1:].contiguous(), x[..., :1].contiguous()]
    for part in parts:
        if part.requires_grad:
            part.register_hook(torch.Tensor.contiguous)
    return torch.cat(parts, 3)


@dataclass(frozen=True)
class Operator:
    """A function of tensors: the first `cut` of them are sharded along `dim`, the others are parameters."""

    family: str
    run: Callable[..., Tensor]
    shapes: tuple[Shape, ...] = (IMAGE,)
    cut: int = 1
    dim: int = 3
    local_cut: int | None = None  # how many of them the bare local part has cut, where that differs
    local: Callable[..., Tensor] | None = None  # what the bare local part runs, where `run` would do less there


PER_CHANNEL = ((CHANNELS,), (CHANNELS,))
TOKENS = (2, 8, 1024, 32)
OPERATORS = {
    "max_pool k3 s2": Operator("pooling", lambda x: F.max_pool2d(x, 3, 2, 1)),
    "avg_pool k2": Operator("pooling", lambda x: F.avg_pool2d(x, 2)),
    "adaptive_avg_pool 7": Operator("pooling", lambda x: F.adaptive_avg_pool2d(x, 7)),
    "max_unpool": Operator("pooling", unpooled),
    "batch_norm, training": Operator(
        "normalisation", lambda x, w, b: F.batch_norm(x, None, None, w, b, training=True), (IMAGE, *PER_CHANNEL)
    ),
    "group_norm": Operator("normalisation", lambda x, w, b: F.group_norm(x, 8, w, b), (IMAGE, *PER_CHANNEL)),
    "layer_norm over space": Operator("normalisation", lambda x: F.layer_norm(x, x.shape[2:])),
    "instance_norm": Operator("normalisation", lambda x: F.instance_norm(x)),
    "bilinear x2": Operator(
        "resampling", lambda x: F.interpolate(x, scale_factor=2, mode="bilinear"), ((1, 32, 256, 256),)
    ),
    "pixel_shuffle": Operator("resampling", lambda x: F.pixel_shuffle(x, 2)),
    "reflect pad": Operator("padding", lambda x: F.pad(x, (1, 1, 1, 1), mode="reflect")),
    "slice and cat": Operator(
        "indexing",
        lambda x: torch.cat([x[..., 1:], x[..., :1]], 3),
        local=joined_locally,
    ),
    "roll": Operator("indexing", lambda x: x.roll(3, 3)),
    "ConvNeXt MLP": Operator(
        "linear", mlp, ((1, CHANNELS, 96, 96), *PER_CHANNEL, (4 * CHANNELS, CHANNELS), (CHANNELS, 4 * CHANNELS))
    ),
    "squeeze-excite": Operator(
        "linear", squeeze_excite, (IMAGE, (CHANNELS // 4, CHANNELS, 1, 1), (CHANNELS, CHANNELS // 4, 1, 1))
    ),
    "attention": Operator("linear", F.scaled_dot_product_attention, (TOKENS,) * 3, cut=3, dim=2, local_cut=1),
    "cross_entropy": Operator("losses", cross_entropy),
    "mse_loss": Operator("losses", lambda x, y: F.mse_loss(x, y), (IMAGE, IMAGE), cut=2),
    "mean over space": Operator("reductions", lambda x: x.mean((2, 3))),
    "amax over space": Operator("reductions", lambda x: x.amax((2, 3))),
    "dropout": Operator("random", lambda x: F.dropout(x, 0.1)),
}
PARAMETERS = [(256, 256, 3, 3)] * 8
STEPS = {"AdamW, fused step": {"fused": True}, "AdamW, foreach step": {"foreach": True}}


def tensors(shapes: Sequence[Shape]) -> list[Tensor]:
    """About zero, so that a part's mean is not nearly the whole's, and a result that is made of it shows."""
    torch.manual_seed(0)
    return [torch.rand(shape) - 0.5 for shape in shapes]


def differentiable(
    function: Callable[..., Tensor], given: Sequence[Tensor], backward: bool, between: Callable[[], None] | None = None
) -> Callable[[], list[Tensor]]:
    """With something done `between` forward and backward, if anything is."""
    leaves = [t.detach().requires_grad_(backward) for t in given]
    gradient = _ones(function(*(t.detach() for t in given))) if backward else None

    def run() -> list[Tensor]:
        y = function(*leaves)
        if between is not None:
            between()
        return [_settled(y), *(torch.autograd.grad(y, leaves, gradient) if backward else [])]

    return run


def _settled(result: Tensor) -> Tensor:
    """Without pending sums."""
    if not isinstance(result, DTensor) or not any(isinstance(p, Partial) for p in result.placements):
        return result
    whole = [Replicate() if isinstance(p, Partial) else p for p in result.placements]
    return result.detach().redistribute(placements=whole)


def _ones(like: Tensor) -> Tensor:
    ones = torch.ones(like.shape)
    if not isinstance(like, DTensor):
        return ones
    placements = [Replicate() if isinstance(p, Partial) else p for p in like.placements]
    return distribute_tensor(ones, like.device_mesh, placements, src_data_rank=None)


def optimizing(parameters: Sequence[Tensor], options: dict[str, bool]) -> Callable[[], list[Tensor]]:
    leaves = [t.detach().requires_grad_() for t in parameters]
    for leaf in leaves:
        leaf.grad = leaf.detach().clone()
    optimizer = torch.optim.AdamW(leaves, **options)  # type: ignore[arg-type]

    def run() -> list[Tensor]:
        optimizer.step()
        return leaves

    return run


def work(
    name: str, given: Sequence[Tensor], backward: bool, local: bool = False, between: Callable[[], None] | None = None
) -> Callable[[], list[Tensor]]:
    if name in STEPS:
        return optimizing(given, STEPS[name])
    operator = OPERATORS[name]
    return differentiable(operator.local or operator.run if local else operator.run, given, backward, between)


def shapes_of(name: str) -> Sequence[Shape]:
    return PARAMETERS if name in STEPS else OPERATORS[name].shapes
