"""Attention, whichever of batch, heads and tokens are sharded.

Queries stay on their ranks. If the tokens of keys and values are sharded, small ones are gathered, and large ones are
passed around the ranks in pieces (ring attention): no rank ever holds all of them. `scaled_dot_product_attention` is
decomposed into one operator of convmesh for all devices, whose rules call the kernels on local tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import sqrt
from typing import Any

import torch
import torch.nn.functional as F
from torch.distributed.tensor import DTensor
from torch.distributed.tensor import empty as empty_dtensor
from torch.distributed.tensor.placement_types import Placement, Shard

from ... import _torch
from ...kernels.attention import has_rules_of_torch, sums_in
from ...sharding.registry import Behaviour, composite, while_installed
from ...sharding.sharding_table import R
from .attention_blocks import TOKENS

aten = torch.ops.aten
Tensor = torch.Tensor

# Keys and values of at most this many bytes, for the batch and heads that a rank has, are gathered: sending them in
# pieces would take longer.
GATHERED_BYTES = 2**20

ATTENTION = Behaviour(
    "batch, heads, tokens",
    "keys and values whose tokens are sharded: gathered up to 1 MiB, beyond that passed around the ranks in pieces, of "
    "which a rank holds two at a time; if there are few queries, all-reduces of the results instead; with a mask that "
    "needs a gradient, keys and values are gathered",
)  # fmt: skip


@composite("scaled_dot_product_attention", ATTENTION)
def attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
    is_causal: bool = False, *, scale: float | None = None, enable_gqa: bool = False,
) -> Tensor:  # fmt: skip
    """`[... T d] [... S d] [... S e] -> [... T e]`; left to torch if DTensor has rules for these placements."""
    tokens = query.dim() - 2
    sharded = any(_sharded(tensor, tokens) for tensor in (query, key, value))
    if not sharded and has_rules_of_torch(query.device):
        operator = aten.scaled_dot_product_attention.default
        given = (query, key, value, attn_mask, dropout_p, is_causal)
        result: Tensor = _torch.composite(operator, given, {"scale": scale, "enable_gqa": enable_gqa})
        return result
    if is_causal and attn_mask is not None:
        raise RuntimeError("scaled_dot_product_attention: a mask and is_causal exclude each other")
    scale = 1 / sqrt(query.shape[-1]) if scale is None else scale
    if attn_mask is not None and attn_mask.requires_grad and torch.is_grad_enabled():
        return _with_scores(query, key, value, attn_mask, dropout_p, scale)
    fused = _may_be_fused(query, key, value, attn_mask)
    if not enable_gqa:
        query, key, value = _with_equal_heads(query, key, value)
    query, key, value, attn_mask, shape = _as_four(query, key, value, attn_mask)
    width = value.shape[-1]
    if width < query.shape[-1]:  # kernels take keys and values of one size
        value = F.pad(value, (0, query.shape[-1] - width))
    elif width > query.shape[-1]:
        query, key = (F.pad(one, (0, width - query.shape[-1])) for one in (query, key))
    kept = _kept(query, key, value, dropout_p) if dropout_p else None
    made: Tensor = torch.ops.convmesh.attention(query, key, value, attn_mask, kept, dropout_p, is_causal, scale)[0]
    made = made[..., :width].reshape(shape) if made.shape[-1] != width else made.reshape(shape)
    return made if fused else made.contiguous()


def _may_be_fused(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> bool:
    """Whether one device may use a fused kernel for tensors of these sizes, which decides the strides of the result.

    Not for tensors that are expanded or padded here before the operator sees them.
    """
    fits = query.dim() == key.dim() == value.dim() == 4 and query.shape[-1] == key.shape[-1] == value.shape[-1]
    fits = fits and query.shape[:2] == key.shape[:2] == value.shape[:2] and (mask is None or mask.dim() in (2, 4))
    return fits and torch.backends.cuda.flash_sdp_enabled()


def _sharded(tensor: Tensor, dim: int) -> bool:
    return isinstance(tensor, DTensor) and any(getattr(p, "dim", None) == dim for p in tensor.placements)


def _with_equal_heads(*given: Tensor) -> list[Tensor]:
    """Expand a single head to the number of heads of the others."""
    heads = [one.shape[-3] for one in given if one.dim() > 2]
    if len(set(heads)) < 2:
        return list(given)
    if set(heads) - {1, max(heads)}:
        raise RuntimeError(f"{heads[0]} heads of queries and {heads[1]} of keys: only with enable_gqa=True")
    return [one.expand(*one.shape[:-3], max(heads), -1, -1) if one.dim() > 2 else one for one in given]


def _as_four(*given: Tensor | None) -> tuple[Any, ...]:
    """Reshape all tensors to batch, heads, tokens and features; also return the shape of the result."""
    query, _, value = given[:3]
    assert query is not None
    assert value is not None
    outer = torch.broadcast_shapes(*(one.shape[:-3] for one in given[:3] if one is not None))
    shape = (*outer, *query.shape[max(0, query.dim() - 3) : -1], value.shape[-1])
    without_heads = all(one is not None and one.dim() == 3 for one in given[:3])

    def four(tensor: Tensor | None) -> Tensor | None:
        if tensor is None or (tensor.dim() == 4 and (tensor.shape[:1] == outer or tensor.shape[0] == 1)):
            return tensor
        if without_heads and tensor.dim() == 3:
            return tensor.unsqueeze(1)
        while tensor.dim() < 4:
            tensor = tensor.unsqueeze(0)
        return tensor.expand(*outer, *tensor.shape[-3:]).flatten(0, -4) if tensor.dim() > 4 else tensor

    made = [four(one) for one in given]
    batch = max(one.shape[0] for one in made[:3] if one is not None)
    made[:3] = [one if one is None or one.shape[0] == batch else one.expand(batch, -1, -1, -1) for one in made[:3]]
    return (*made, shape)


def _with_scores(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, dropout: float, scale: float) -> Tensor:
    """Compute all scores: a mask with a gradient is as large as they are anyway."""
    scores = (query * scale) @ key.transpose(-2, -1)
    weights = (scores + mask).softmax(-1)
    return (F.dropout(weights, dropout) if dropout else weights) @ value


def _kept(query: Tensor, key: Tensor, value: Tensor, dropout: float) -> Tensor:
    """Draw the mask of dropout as one device does, for this rank's queries, a byte for each weight."""
    first = next(one for one in (query, key, value) if isinstance(one, DTensor))
    placements: Sequence[Placement] = query.placements if isinstance(query, DTensor) else (R,) * first.device_mesh.ndim
    at = [p if isinstance(p, Shard) and p.dim <= TOKENS else R for p in placements]
    weights = empty_dtensor(
        *query.shape[:3], key.shape[2], dtype=torch.bool, device_mesh=first.device_mesh, placements=at
    )
    return weights.bernoulli_(1 - dropout)


_library = torch.library.Library("convmesh", "FRAGMENT")
_library.define(
    "attention(Tensor query, Tensor key, Tensor value, Tensor? mask, Tensor? kept, float dropout, bool causal, "
    "float scale) -> (Tensor, Tensor)"
)
_library.define(
    "attention_backward(Tensor grad, Tensor query, Tensor key, Tensor value, Tensor out, Tensor total, Tensor? mask, "
    "Tensor? kept, float dropout, bool causal, float scale) -> (Tensor, Tensor, Tensor)"
)
forward_operator = torch.ops.convmesh.attention.default
backward_operator = torch.ops.convmesh.attention_backward.default


def _fake(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, kept: Tensor | None, *_: Any) -> Any:
    """Return the strides of one device: those of the query, dense, with a fused kernel, else contiguous.

    Fused kernels support no dropout, no strided features and no groups of heads.
    """
    total = query.new_empty(query.shape[:3], dtype=sums_in(query.dtype))
    apart = any(one.stride(-1) != 1 for one in (query, key, value))
    if kept is not None or apart or query.shape[1] != key.shape[1]:
        return query.new_empty(query.shape), total
    return torch.empty_like(query), total


def _fake_backward(grad: Tensor, query: Tensor, key: Tensor, value: Tensor, *_: Any) -> Any:
    return tuple(map(_token_by_token, (query, key, value)))


def _token_by_token(like: Tensor) -> Tensor:
    batch, heads, tokens, width = like.shape
    return like.new_empty((batch, tokens, heads, width)).transpose(1, 2)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    query, key, value, mask, kept, *ctx.numbers = inputs
    ctx.save_for_backward(query, key, value, *output, mask, kept)
    ctx.set_materialize_grads(False)


def _gradients(ctx: Any, gradient: Tensor | None, _: Any) -> tuple[Tensor | None, ...]:
    if gradient is None:
        return (None,) * 8
    return (*backward_operator(gradient, *ctx.saved_tensors, *ctx.numbers), *(None,) * 5)


def _no_gradients(ctx: Any, *_: Any) -> Any:
    raise RuntimeError("derivative for scaled_dot_product_attention's backward pass is not implemented")


torch.library.register_fake("convmesh::attention", _fake, lib=_library)
torch.library.register_fake("convmesh::attention_backward", _fake_backward, lib=_library)
torch.library.register_autograd("convmesh::attention", _gradients, setup_context=_save, lib=_library)
torch.library.register_autograd("convmesh::attention_backward", _no_gradients, lib=_library)


def _step_by_step() -> Callable[[], None]:
    """Switch off torch's fused operator for transformer layers in evaluation, which has no rule for DTensors."""
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    return lambda: torch.backends.mha.set_fastpath_enabled(before)


while_installed(_step_by_step)
