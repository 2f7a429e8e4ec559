"""What each layer reads, and the gradient of what it writes: one call of every layer that has parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Replicate
from torch.nn.modules.conv import _ConvNd
from torch.nn.modules.instancenorm import _InstanceNorm

# Their forward keeps no output for backward, so that a tap may sit right behind it.
LAYERS = (_ConvNd, nn.Linear, nn.Embedding, nn.GroupNorm, nn.LayerNorm, _InstanceNorm)


@dataclass
class Call:
    """One call of a layer: what it read, and what backward brings."""

    layer: nn.Module
    read: Tensor
    grad: Tensor | None = None


class _Tap(torch.autograd.Function):
    """Passes a value on, and notes its gradient on the way back. Works in place, so that later in-place layers may."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, anchor: Tensor, call: Call) -> Tensor:
        ctx.call = call
        ctx.mark_dirty(value)
        return value

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        ctx.call.grad = grads[0]
        return grads[0], None, None


def calls_of_layers(
    model: nn.Module, trainable: Sequence[str], total_loss: Callable[[Tensor], Tensor], x: Tensor
) -> list[Call] | None:
    """One for each layer that has parameters; None where they are shared, unknown, or used more than once."""
    layers = _owners(model, trainable)
    if layers is None:
        return None
    calls = _calls(layers, total_loss, x)
    sizes = {call.read.shape[:1] for call in calls}
    return calls if len(calls) == len({id(call.layer) for call in calls}) and sizes == {x.shape[:1]} else None


def _owners(model: nn.Module, trainable: Sequence[str]) -> list[nn.Module] | None:
    """The layers that hold the trainable parameters, if each has one owner, of a kind that we know."""
    names = [name for name, value in model.named_parameters(remove_duplicate=False) if value.requires_grad]
    if set(names) != set(trainable):
        return None
    owners = {id(owner): owner for owner in (model.get_submodule(name.rpartition(".")[0]) for name in names)}
    known = all(isinstance(owner, LAYERS) and not _is_special(owner) for owner in owners.values())
    sharded = any(
        isinstance(held, DTensor) and set(held.placements) != {Replicate()} for held in _held(owners.values())
    )
    return list(owners.values()) if known and not sharded else None


def _held(layers: Iterable[nn.Module]) -> Iterator[Tensor]:
    for layer in layers:
        yield from layer.parameters()
        yield from layer.buffers()


def _is_special(layer: nn.Module) -> bool:
    """Classes derived from torch's own, and parametrized layers, may compute with another weight than they hold; some
    embeddings rescale theirs while reading."""
    if not type(layer).__module__.startswith("torch.nn.modules."):
        return True
    embedding = isinstance(layer, nn.Embedding) and (layer.max_norm is not None or layer.scale_grad_by_freq)
    return hasattr(layer, "parametrizations") or embedding


def _calls(layers: list[nn.Module], total_loss: Callable[[Tensor], Tensor], x: Tensor) -> list[Call]:
    calls: list[Call] = []
    anchor = torch.zeros((), device=x.device, requires_grad=True)

    def tap(layer: nn.Module, read: tuple[Tensor, ...], written: Tensor) -> Tensor:
        call = Call(layer, read[0].detach())
        calls.append(call)
        tapped: Tensor = _Tap.apply(written, anchor, call)
        return tapped

    hooks = [layer.register_forward_hook(tap) for layer in layers]
    try:
        with torch.enable_grad():
            loss = total_loss(x.detach())
    finally:
        for hook in hooks:
            hook.remove()
    if loss.requires_grad:
        torch.autograd.grad(loss, anchor, allow_unused=True)
    return calls
