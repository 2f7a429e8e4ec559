"""At least one function for every operator family. The first input is sharded over space, the others are replicated."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

SHAPE = (2, 4, 11, 6)


def unpooled(x: torch.Tensor) -> torch.Tensor:
    values, indices = F.max_pool2d(x, 2, return_indices=True)
    return F.max_unpool2d(values, indices, (2, 2), output_size=list(x.shape[2:]))


def sampled(x: torch.Tensor, theta: torch.Tensor) -> torch.Tensor:
    return F.grid_sample(x, F.affine_grid(theta, [2, 4, 7, 5], align_corners=False), align_corners=False)


def attended(x: torch.Tensor) -> torch.Tensor:
    tokens = x.flatten(2).transpose(1, 2)
    return F.scaled_dot_product_attention(tokens, tokens, tokens)


def batch_normed(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    return F.batch_norm(x, None, None, weight, bias, training=True)


def convnext(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    y = F.layer_norm(x.permute(0, 2, 3, 1), (SHAPE[1],), weight, bias)
    return F.gelu(F.linear(y, torch.outer(weight, bias))).permute(0, 3, 1, 2)


def classified(x: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(x, x.detach()[:, 0].abs().long().clamp(0, SHAPE[1] - 1))


CHANNEL = ((SHAPE[1],), (SHAPE[1],))
Function = Callable[..., torch.Tensor]
# name: (function, shapes of its replicated inputs)
FUNCTIONS: dict[str, tuple[Function, tuple[tuple[int, ...], ...]]] = {
    "max_pool": (lambda x: F.max_pool2d(x, 3, 2, 1), ()),
    "avg_pool": (lambda x: F.avg_pool2d(x, 3, 2, 1), ()),
    "adaptive_avg_pool": (lambda x: F.adaptive_avg_pool2d(x, (4, 5)), ()),
    "adaptive_max_pool": (lambda x: F.adaptive_max_pool2d(x, (4, 5)), ()),
    "lp_pool": (lambda x: F.lp_pool2d(x.abs() + 1, 3, 2), ()),
    "max_unpool": (unpooled, ()),
    "nearest": (lambda x: F.interpolate(x, scale_factor=2), ()),
    "nearest-exact": (lambda x: F.interpolate(x, size=(7, 9), mode="nearest-exact"), ()),
    "bilinear": (lambda x: F.interpolate(x, scale_factor=1.7, mode="bilinear"), ()),
    "bicubic": (lambda x: F.interpolate(x, scale_factor=1.7, mode="bicubic"), ()),
    "area": (lambda x: F.interpolate(x, size=(5, 3), mode="area"), ()),
    "antialias": (lambda x: F.interpolate(x, size=(5, 4), mode="bilinear", antialias=True), ()),
    "pixel_shuffle": (lambda x: F.pixel_shuffle(x, 2), ()),
    "pixel_unshuffle": (lambda x: F.pixel_unshuffle(x[:, :, :10], 2), ()),
    "grid_sample": (sampled, ((2, 2, 3),)),
    "constant pad": (lambda x: F.pad(x, (1, 2, -1, 3), value=2.0), ()),
    "reflect pad": (lambda x: F.pad(x, (1, 2, 3, 1), mode="reflect"), ()),
    "replicate pad": (lambda x: F.pad(x, (1, 2, 3, 1), mode="replicate"), ()),
    "circular pad": (lambda x: F.pad(x, (1, 2, 3, 1), mode="circular"), ()),
    "slice": (lambda x: x[:, :, 1:9:2], ()),
    "select": (lambda x: x[:, :, 3], ()),
    "cat": (lambda x: torch.cat([x[:, :, 2:], x], 2), ()),
    "stack": (lambda x: torch.stack([x, x * 2], 2), ()),
    "split": (lambda x: x.split(4, 2)[1], ()),
    "flip": (lambda x: x.flip(2), ()),
    "roll": (lambda x: x.roll(3, 2), ()),
    "unfold": (lambda x: F.unfold(x, 3, padding=1), ()),
    "fourier": (lambda x: torch.fft.irfft2(torch.fft.rfft2(x).conj() * 2, s=x.shape[2:]), ()),
    "batch_norm": (batch_normed, CHANNEL),
    "group_norm": (lambda x, w, b: F.group_norm(x, 2, w, b), CHANNEL),
    "instance_norm": (lambda x, w, b: F.instance_norm(x, weight=w, bias=b), CHANNEL),
    "layer_norm": (lambda x: F.layer_norm(x, x.shape[2:]), ()),
    "rms_norm": (lambda x: F.rms_norm(x, x.shape[2:]), ()),
    "ConvNeXt": (convnext, CHANNEL),
    "attention": (attended, ()),
    "glu": (lambda x: F.glu(x, 1), ()),
    "prelu": (lambda x, w: F.prelu(x, w), CHANNEL[:1]),
    "cross_entropy": (classified, ()),
    "mse_loss": (lambda x: F.mse_loss(x, x.detach() * 2), ()),
    "mean": (lambda x: x.mean((2, 3)), ()),
    "var": (lambda x: x.var((2, 3)), ()),
    "amax": (lambda x: x.amax(2), ()),
}


def dropped(x: torch.Tensor) -> torch.Tensor:
    torch.manual_seed(3)
    return F.dropout(x, 0.4)


def stepped(x: torch.Tensor) -> torch.Tensor:
    momentum = x.detach().clone()
    torch.ops.aten._foreach_mul_.Scalar([momentum], 0.9)
    return x * momentum


# Also for families whose functions do not compile into one graph, or that have their own tests of compiled code.
ALL_FUNCTIONS = FUNCTIONS | {
    "convolution": (lambda x, w: F.conv2d(x, w, stride=2, padding=1), ((3, SHAPE[1], 3, 3),)),
    "sort": (lambda x: x.sort(2).values, ()),
    "gather": (lambda x: x.gather(2, x.detach().argsort(2)), ()),
    "index_select": (lambda x: x[:, :, [7, 0, 3]], ()),
    "matmul": (lambda x, w: x @ w, ((SHAPE[3], 5),)),
    "dropout": (dropped, ()),
    "foreach": (stepped, ()),
}

# These draw other numbers in another dtype or on another device.
RANDOM = frozenset({"dropout"})
