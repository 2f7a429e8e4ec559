"""Attention of a block of queries to a block of keys. Also returns the logsumexp of the scores, to combine blocks.

torch's fused kernels return it without storing the scores. Other implementations store the scores of one block.
"""

from __future__ import annotations

from math import inf

import torch

from .. import _torch
from .backend import Kernel

aten = torch.ops.aten
Tensor = torch.Tensor

# A dry run takes the fused kernel of CPUs for that of any device: all of them keep no scores.
_AS_CPUS = ("cpu", _torch.DEVICE)
_HALVES = (torch.float16, torch.bfloat16)


def has_rules_of_torch(device: torch.device) -> bool:
    """Whether DTensor has rules for the fused kernels of a device. It has none for those of CPUs."""
    return device.type not in _AS_CPUS


def sums_in(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which blocks are accumulated."""
    return torch.float32 if dtype in _HALVES else dtype


@Kernel
def attend(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, kept: Tensor | None, causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """`[B H T d] [B K S d] [B K S e] -> [B H T e] [B H T]`: output and logsumexp; H / K heads share keys and values.

    `bias` is added to the scores. The weights are multiplied by `kept`, the scaled mask of dropout. For a query that
    may attend to no key, the output is zero and the logsumexp -inf.
    """
    key, value = _for_each(query, key), _for_each(query, value)
    scores = _scores(query, key, bias, causal, scale)
    total = scores.logsumexp(-1)
    weights = (scores - _finite(total).unsqueeze(-1)).exp()
    weights = weights if kept is None else weights * kept
    return weights.to(value.dtype) @ value, total


@Kernel
def attend_backward(
    gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, total: Tensor, bias: Tensor | None,
    kept: Tensor | None, causal: bool, scale: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return the gradients of query, key and value; `out` and `total` (logsumexp) are over all keys, and finite."""
    shared, (key, value) = key.shape[-3], (_for_each(query, key), _for_each(query, value))
    weights = (_scores(query, key, bias, causal, scale) - total.unsqueeze(-1)).exp()
    by_weight = gradient @ value.transpose(-2, -1)
    dropped = weights
    if kept is not None:
        by_weight, dropped = by_weight * kept, weights * kept
    by_score = (weights * (by_weight - (gradient * out).sum(-1, keepdim=True)) * scale).to(query.dtype)
    by_key, by_value = by_score.transpose(-2, -1) @ query, dropped.to(query.dtype).transpose(-2, -1) @ gradient
    return by_score @ key, _added_up(by_key, shared), _added_up(by_value, shared)


def _for_each(query: Tensor, shared: Tensor) -> Tensor:
    """Repeat heads of keys or values, so that each head of queries has one."""
    heads = shared.shape[-3]
    return shared if heads == query.shape[-3] else shared.repeat_interleave(query.shape[-3] // heads, -3)


def _added_up(gradient: Tensor, heads: int) -> Tensor:
    return gradient if gradient.shape[-3] == heads else gradient.unflatten(-3, (heads, -1)).sum(-3)


def _scores(query: Tensor, key: Tensor, bias: Tensor | None, causal: bool, scale: float) -> Tensor:
    wide = sums_in(query.dtype)
    scores = (query.to(wide) * scale) @ key.to(wide).transpose(-2, -1)
    if causal:
        ahead = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
        scores = scores.masked_fill(ahead, -inf)
    return scores if bias is None else scores + bias


def _finite(total: Tensor) -> Tensor:
    return total.masked_fill(total == -inf, 0)


def _cpu_takes(
    query: Tensor, key: Tensor, value: Tensor, kept: Tensor | None, causal: bool, scale: float
) -> bool:  # fmt: skip
    return (
        kept is None
        and (scale > 0 or not causal)  # it hides keys by -inf before it scales
        and bool(query.numel() and key.numel())  # the kernel divides by sizes, which ends the process
        and query.dtype in (torch.float32, torch.float64, *_HALVES)
        and key.shape == value.shape
        and torch.backends.cuda.flash_sdp_enabled()  # which is not about CUDA only
    )


def _fused_on_cpu(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, kept: Tensor | None, causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    given = map(_rows, (query, key, value))
    mask = None if bias is None else bias.to(query.dtype)
    out, total = aten._scaled_dot_product_flash_attention_for_cpu.default(
        *given, 0.0, causal, attn_mask=mask, scale=scale
    )
    if bias is not None:  # where a query sees nothing the kernel says 0, which is as if it had seen something
        total = total.masked_fill((bias == -inf).all(-1), -inf)
    return out, total


def _fused_on_cpu_backward(
    gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, total: Tensor, bias: Tensor | None,
    kept: Tensor | None, causal: bool, scale: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    given = map(_rows, (gradient, query, key, value, out))
    mask = None if bias is None else bias.to(query.dtype)
    made: tuple[Tensor, Tensor, Tensor] = aten._scaled_dot_product_flash_attention_for_cpu_backward.default(
        *given, total, 0.0, causal, attn_mask=mask, scale=scale
    )
    return made


def _rows(tensor: Tensor) -> Tensor:
    """Make the last dimension contiguous: the kernels assume it, and do not check."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


for _device in _AS_CPUS:
    attend.on(
        _device, lambda query, key, value, bias, kept, causal, scale: _cpu_takes(query, key, value, kept, causal, scale)
    )(_fused_on_cpu)
    attend_backward.on(
        _device,
        lambda gradient, query, key, value, out, total, bias, kept, causal, scale: _cpu_takes(
            query, key, value, kept, causal, scale
        ),
    )(_fused_on_cpu_backward)


def _cuda_takes(query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, kept: Tensor | None) -> bool:
    """Whether torch's flash attention supports the call: no bias, no dropout mask, half precision."""
    return (
        bias is None
        and kept is None
        and bool(query.numel() and key.numel())
        and query.dtype in _HALVES
        and key.shape == value.shape
        and query.shape[-1] % 8 == 0
        and query.shape[-1] <= 256
        and torch.cuda.get_device_capability(query.device) >= (8, 0)
        and torch.backends.cuda.flash_sdp_enabled()
    )


@attend.on("cuda", lambda query, key, value, bias, kept, causal, scale: _cuda_takes(query, key, value, bias, kept))
def _fused_on_cuda(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, kept: Tensor | None, causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    given = map(_rows, (query, key, value))
    out, total, *_ = aten._scaled_dot_product_flash_attention.default(*given, 0.0, causal, scale=scale)
    return out, total


@attend_backward.on(
    "cuda",
    lambda gradient, query, key, value, out, total, bias, kept, causal, scale: _cuda_takes(
        query, key, value, bias, kept
    ),
)
def _fused_on_cuda_backward(
    gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, total: Tensor, bias: Tensor | None,
    kept: Tensor | None, causal: bool, scale: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    given = map(_rows, (gradient, query, key, value, out))
    none = torch.empty(0, dtype=torch.int32, device=query.device)  # sequences of one length, and nothing is drawn
    state = torch.empty(2, dtype=torch.uint64, device=query.device), torch.empty(0, device=query.device)
    made: tuple[Tensor, Tensor, Tensor] = aten._scaled_dot_product_flash_attention_backward.default(
        *given, total.contiguous(), none, none, query.shape[-2], key.shape[-2], 0.0, causal, *state, scale=scale
    )
    return made
