"""Attention over tokens that are sharded, such as the pixels of a feature map.

Queries stay where they are. Every query reads all keys and values, so these are gathered.
"""

from __future__ import annotations

from collections.abc import Callable
from math import sqrt

import torch
import torch.nn.functional as F
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor.placement_types import Placement, Replicate, Shard

from ... import _torch
from ...kernels.attention import cpu_kernel_takes, has_gradient_on_dtensors
from ...sharding.registry import Behaviour, composite, while_installed

aten = torch.ops.aten

ATTENTION = Behaviour("batch, heads, tokens of the queries", "keys and values, gathered along sharded tokens")


@composite("scaled_dot_product_attention", ATTENTION)
def attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0, is_causal: bool = False, *, scale: float | None = None, enable_gqa: bool = False,
) -> torch.Tensor:  # fmt: skip
    """[... T d] [... S d] [... S e] -> [... T e]; torch's own where it has rules for what is sharded."""
    tokens = query.dim() - 2
    sharded = any(_sharded(tensor, tokens) for tensor in (query, key, value))
    own = isinstance(query, DTensor) and not has_gradient_on_dtensors(query.device)
    if not sharded and not own:
        operator = aten.scaled_dot_product_attention.default
        given = (query, key, value, attn_mask, dropout_p, is_causal)
        result: torch.Tensor = _torch.composite(operator, given, {"scale": scale, "enable_gqa": enable_gqa})
        return result
    key, value = _gathered(key, tokens), _gathered(value, tokens)
    if enable_gqa:  # heads of queries, in groups that share one head of keys and values
        heads = query.shape[-3]
        key, value = (t.repeat_interleave(heads // t.shape[-3], -3) for t in (key, value))
    if attn_mask is None and not dropout_p and not is_causal and _fused(query, key, value):
        fused: torch.Tensor = aten._scaled_dot_product_flash_attention_for_cpu.default(query, key, value, scale=scale)[
            0
        ]
        return fused
    scores = (query * (1 / sqrt(query.shape[-1]) if scale is None else scale)) @ key.transpose(-2, -1)
    if is_causal:
        attn_mask = _causal(query, key, tokens)
    if attn_mask is not None:
        hides = attn_mask.dtype == torch.bool
        scores = scores.masked_fill(~attn_mask, -torch.inf) if hides else scores + attn_mask
    weights = scores.softmax(-1)
    return (F.dropout(weights, dropout_p) if dropout_p else weights) @ value


def _fused(*tensors: torch.Tensor) -> bool:
    return all(isinstance(tensor, DTensor) for tensor in tensors) and cpu_kernel_takes(*tensors)


def _sharded(tensor: torch.Tensor, dim: int) -> bool:
    return isinstance(tensor, DTensor) and any(getattr(p, "dim", None) == dim for p in tensor.placements)


def _gathered(tensor: torch.Tensor, dim: int) -> torch.Tensor:
    if not isinstance(tensor, DTensor) or not _sharded(tensor, dim):
        return tensor
    return tensor.redistribute(placements=[Replicate() if p == Shard(dim) else p for p in tensor.placements])


def _causal(query: torch.Tensor, key: torch.Tensor, tokens: int) -> torch.Tensor:
    """True where a query may look, sharded as the queries are."""
    assert isinstance(query, DTensor)
    mask = torch.ones(query.shape[-2], key.shape[-2], dtype=torch.bool, device=_torch.local_of(query).device).tril()
    placements: list[Placement] = [Shard(0) if p == Shard(tokens) else Replicate() for p in query.placements]
    return distribute_tensor(mask, query.device_mesh, placements, src_data_rank=None)


def _step_by_step() -> Callable[[], None]:
    """nn.MultiheadAttention and transformer layers take one fused operator in evaluation, which no DTensor knows."""
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    return lambda: torch.backends.mha.set_fastpath_enabled(before)


while_installed(_step_by_step)
