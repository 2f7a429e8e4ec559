"""The layers that use each parameter of a model, with their inputs and the gradients of their outputs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Replicate
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

# Layers whose forward keeps no output for backward, so that an in-place tap may directly follow them.
LAYERS = (_ConvNd, nn.Linear, nn.Embedding, nn.GroupNorm, nn.LayerNorm, _InstanceNorm, _BatchNorm)

Use = tuple[nn.Module, str, Tensor, Tensor]  # layer, the parameter's name in it, input, gradient of the output


@dataclass
class Call:
    """One call of a layer: its input, and the gradient of its output."""

    layer: nn.Module
    activation: Tensor
    version: int
    grad: Tensor | None = None


def run_by_layer(
    model: nn.Module, trainable: Mapping[str, Tensor], losses: Callable[[], Tensor], batch: int, keep_graph: bool
) -> tuple[Tensor, dict[str, list[Use]]] | None:
    """Return the losses of the samples, [B], and all uses of each parameter, with gradients of the sum of the losses.

    `losses` calls the model with the tensors of `trainable` in place of its parameters. Returns None if anything but a
    known layer may use one of them, or if a layer does not read the samples along dimension 0.
    """
    names = {id(value): name for name, value in model.named_parameters() if value.requires_grad}
    held = {layer: dict(layer.named_parameters(recurse=False)) for layer in model.modules()}
    owners = [layer for layer, own in held.items() if any(id(value) in names for value in own.values())]
    if not all(_is_known(layer) for layer in owners):
        return None
    watch = _ParameterWatch({id(value) for value in trainable.values()})
    losses_by_sample, calls = _record(owners, watch, losses, keep_graph)
    if watch.escaped or any(_is_unbatched(call) or call.activation.shape[:1] != (batch,) for call in calls):
        return None
    uses: dict[str, list[Use]] = {name: [] for name in trainable}
    for call in calls:
        if call.activation._version != call.version:
            raise RuntimeError(f"the input of {call.layer} was overwritten in place, so it has no gradient here")
        for own, value in held[call.layer].items():
            if call.grad is not None and id(value) in names:
                uses[names[id(value)]].append((call.layer, own, call.activation, call.grad))
    return losses_by_sample, uses


def _is_known(layer: nn.Module) -> bool:
    """Whether a layer is one of torch's own, and computes with exactly the weight that it holds.

    Derived classes and parametrized layers may use another weight; some embeddings rescale theirs while reading.
    """
    if not isinstance(layer, LAYERS) or not type(layer).__module__.startswith("torch.nn.modules."):
        return False
    if isinstance(layer, nn.Embedding) and (layer.max_norm is not None or layer.scale_grad_by_freq):
        return False
    held = [*layer.parameters(), *layer.buffers()]
    sharded = any(isinstance(each, DTensor) and set(each.placements) != {Replicate()} for each in held)
    return not hasattr(layer, "parametrizations") and not sharded


def _is_unbatched(call: Call) -> bool:
    return isinstance(call.layer, _ConvNd) and call.activation.ndim < call.layer.weight.ndim


class _GradientTap(torch.autograd.Function):
    """Pass a value on, and record its gradient in backward.

    It works in place, so that later in-place layers may too.
    """

    @staticmethod
    def forward(ctx: Any, value: Tensor, anchor: Tensor, call: Call) -> Tensor:
        ctx.call = call
        ctx.mark_dirty(value)
        return value

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        ctx.call.grad = grads[0]
        return grads[0], None, None


class _ParameterWatch(TorchFunctionMode):
    """Records whether a parameter is read outside of a layer's forward (`F.linear(x, self.embedding.weight)`)."""

    def __init__(self, watched: set[int]) -> None:
        super().__init__()
        self.watched = watched
        self.in_layer = self.escaped = False

    def __torch_function__(
        self, function: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        is_use = not self.in_layer and function is not Tensor.requires_grad_
        if is_use and any(id(each) in self.watched for each in tree_leaves((args, kwargs))):
            self.escaped |= any(isinstance(each, Tensor) for each in tree_leaves(result))  # a shape does not count
        return result


def _record(
    layers: Sequence[nn.Module], watch: _ParameterWatch, losses: Callable[[], Tensor], keep_graph: bool
) -> tuple[Tensor, list[Call]]:
    """Return the losses, and the calls of the layers in order."""
    calls: list[Call] = []
    anchor = torch.zeros((), requires_grad=True)

    def before(layer: nn.Module, args: tuple[Tensor, ...]) -> None:
        watch.in_layer = True

    def tap(layer: nn.Module, args: tuple[Tensor, ...], kwargs: dict[str, Tensor], output: Tensor) -> Tensor:
        watch.in_layer = False
        activation = (args[0] if args else kwargs["input"]).detach()
        calls.append(Call(layer, activation, activation._version))
        tapped: Tensor = _GradientTap.apply(output, anchor, calls[-1])
        return tapped

    hooks = [layer.register_forward_pre_hook(before) for layer in layers]
    hooks += [layer.register_forward_hook(tap, with_kwargs=True) for layer in layers]
    try:
        with torch.enable_grad(), watch:
            losses_by_sample = losses()
            total = losses_by_sample.sum()
        if total.requires_grad and not watch.escaped:
            torch.autograd.grad(total, anchor, allow_unused=True, retain_graph=keep_graph)
    finally:
        for hook in hooks:
            hook.remove()
    return losses_by_sample, calls
