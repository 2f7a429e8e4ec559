"""Per-sample gradients of one layer after the other, from what it reads and the gradient of what it writes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Replicate
from torch.func import functional_call, vjp, vmap
from torch.nn.modules.conv import _ConvNd
from torch.nn.modules.instancenorm import _InstanceNorm

from .layer_calls import calls_of_layers


def gradients_by_layer(
    model: nn.Module, trainable: Sequence[str], total_loss: Callable[[Tensor], Tensor], x: Tensor
) -> dict[str, Tensor] | None:
    """Each parameter's [B ...]; None where the layers cannot tell, or some parameter gets no gradient at all."""
    calls = calls_of_layers(model, trainable, total_loss, x)
    if calls is None or any(call.grad is None for call in calls):
        return None
    prefixes = {id(module): f"{name}." if name else "" for name, module in model.named_modules()}
    found = {}
    for call in calls:
        own = [name for name, value in call.layer.named_parameters() if value.requires_grad]
        assert call.grad is not None
        for name, value in gradients_of(call.layer, own, call.read, call.grad).items():
            found[prefixes[id(call.layer)] + name] = value
    return {name: found[name] for name in trainable} if found.keys() == set(trainable) else None


def gradients_of(layer: nn.Module, names: Sequence[str], read: Tensor, grad: Tensor) -> dict[str, Tensor]:
    """[B ...] of this one layer."""
    if isinstance(layer, nn.GroupNorm | nn.LayerNorm | _InstanceNorm):
        values = {"weight": _normalised(layer, read) * grad, "bias": grad}
        return {name: _sum_to_parameter(layer, values[name]) for name in names}
    parameters = {name: _beside(read, value.detach()) for name, value in layer.named_parameters()}
    if isinstance(layer, _ConvNd) and is_usual(layer):
        made = {"weight": lambda: _of_kernel(layer, parameters["weight"], read, grad), "bias": lambda: _of_bias(grad)}
        return {name: made[name]() for name in names}
    wanted = {name: parameters[name] for name in names}

    def one(x: Tensor, g: Tensor) -> dict[str, Tensor]:
        def call(some: dict[str, Tensor]) -> Tensor:
            written: Tensor = functional_call(layer, {**parameters, **some}, (x.unsqueeze(0),))
            return written

        (gradients,) = vjp(call, wanted)[1](g.unsqueeze(0))
        return cast(dict[str, Tensor], gradients)

    mapped: dict[str, Tensor] = vmap(one)(read, grad)
    return mapped


def is_usual(layer: _ConvNd) -> bool:
    """Whether it is the plain operator with the layer's own numbers as they stand."""
    return not layer.transposed and layer.padding_mode == "zeros" and not isinstance(layer.padding, str)


def _of_kernel(layer: _ConvNd, weight: Tensor, read: Tensor, grad: Tensor) -> Tensor:
    """By the backward operator itself: automatic differentiation would compute the layer's output once more."""
    geometry = (layer.stride, layer.padding, layer.dilation, False, layer.output_padding, layer.groups)

    def one(x: Tensor, g: Tensor) -> Tensor:
        mask = (False, True, False)
        kernel: Tensor = _backward(g.unsqueeze(0), x.unsqueeze(0), weight, None, *geometry, mask)[1]
        return kernel

    mapped: Tensor = vmap(one)(read, grad)
    return mapped


_backward: Callable[..., tuple[Tensor, ...]] = torch.ops.aten.convolution_backward.default


def _of_bias(grad: Tensor) -> Tensor:
    """[B O *] -> [B O]"""
    return grad.flatten(2).sum(2)


def _normalised(layer: nn.GroupNorm | nn.LayerNorm | _InstanceNorm, read: Tensor) -> Tensor:
    """What the layer multiplies by its weight."""
    if isinstance(layer, nn.GroupNorm):
        return F.group_norm(read, layer.num_groups, None, None, layer.eps)
    if isinstance(layer, nn.LayerNorm):
        return F.layer_norm(read, layer.normalized_shape, None, None, layer.eps)
    if layer.running_mean is None or layer.running_var is None:
        return F.instance_norm(read, eps=layer.eps)
    mean, variance = (_beside(read, each) for each in (layer.running_mean, layer.running_var))
    return F.instance_norm(read, mean, variance, use_input_stats=False, eps=layer.eps)


def _sum_to_parameter(layer: nn.GroupNorm | nn.LayerNorm | _InstanceNorm, values: Tensor) -> Tensor:
    """[B C *] -> [B C], or [B * shape] -> [B shape] for a layer norm"""
    kept = len(layer.normalized_shape) if isinstance(layer, nn.LayerNorm) else 0
    summed = list(range(1, values.ndim - kept) if kept else range(2, values.ndim))
    return values.sum(summed) if summed else values


def _beside(read: Tensor, held: Tensor) -> Tensor:
    """What a layer holds, the same on every rank, as a tensor of the kind that it reads."""
    if isinstance(read, DTensor) and not isinstance(held, DTensor):
        return DTensor.from_local(held, read.device_mesh, [Replicate()] * read.device_mesh.ndim, run_check=False)
    return held.to_local() if isinstance(held, DTensor) and not isinstance(read, DTensor) else held
