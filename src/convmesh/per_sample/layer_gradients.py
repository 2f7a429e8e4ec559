"""Per-sample gradients of one layer's parameter, from its input and the gradient of its output."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Replicate
from torch.func import functional_call, vjp, vmap
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd
from torch.nn.modules.instancenorm import _InstanceNorm

from .layer_calls import Use

Norm = nn.GroupNorm | nn.LayerNorm | _InstanceNorm | _BatchNorm


def gradients_of(layer: nn.Module, name: str, activation: Tensor, grad: Tensor) -> Tensor:
    """Return the per-sample gradients [B ...] of a parameter of one layer call."""
    activation = activation if isinstance(layer, nn.Embedding) else activation.to(grad.dtype)  # as autocast did
    if name == "bias":
        return _sum_to_parameter(layer, grad)
    if isinstance(layer, Norm):
        return _sum_to_parameter(layer, _normalised(layer, activation) * grad)
    if isinstance(layer, _ConvNd):
        return _kernel_gradients(layer, activation, grad)
    if isinstance(layer, nn.Linear):
        return rows(grad).mT @ rows(activation)
    weight = _as_same_kind(activation, layer.get_parameter("weight").detach())

    def gradient_of_sample(x: Tensor, g: Tensor) -> Tensor:
        def call(weight: Tensor) -> Tensor:
            output: Tensor = functional_call(layer, {"weight": weight}, (x.unsqueeze(0),))
            return output

        gradient: Tensor = vjp(call, weight)[1](g.unsqueeze(0))[0]
        return gradient

    mapped: Tensor = vmap(gradient_of_sample)(activation, grad)
    return mapped


def scaled_sum(uses: Sequence[Use], scales: Tensor, parameter: Tensor) -> Tensor:
    """Return the gradient of a parameter summed over all samples, each of them scaled. Embeddings are not supported."""
    total = torch.zeros_like(parameter, requires_grad=False)
    for layer, name, activation, grad in uses:
        scaled = grad * scales.to(grad.dtype).view(-1, *[1] * (grad.ndim - 1))
        total += _summed(layer, name, activation, scaled)
    return total


def _summed(layer: nn.Module, name: str, activation: Tensor, grad: Tensor) -> Tensor:
    """Return [...]: the gradient that backward gives this parameter, summed over all samples."""
    if name == "weight" and isinstance(layer, _ConvNd):
        image, response, padding = image_and_response(layer, activation.to(grad.dtype), grad)
        shape = activation.new_empty(layer.weight.shape, dtype=grad.dtype)
        return _backward(response, image, shape, None, *_geometry(layer, padding), (False, True, False))[1]
    if name == "weight" and isinstance(layer, nn.Linear):
        return rows(grad).flatten(0, 1).mT @ rows(activation.to(grad.dtype)).flatten(0, 1)
    return gradients_of(layer, name, activation, grad).sum(0)


def rows(tensor: Tensor) -> Tensor:
    """[B ... C] -> [B T C]"""
    return tensor.reshape(tensor.shape[0], -1, tensor.shape[-1])


def image_and_response(layer: _ConvNd, activation: Tensor, grad: Tensor) -> tuple[Tensor, Tensor, list[int]]:
    """Return the two factors of a kernel gradient, and the zero padding of the image.

    For a transposed convolution, the image is its output and the response its input; its weight has the layout of a
    convolution's.
    """
    image, response = (grad, activation) if layer.transposed else (activation, grad)
    sides = []
    for axis, (kernel, stride, dilation) in enumerate(
        zip(layer.kernel_size, layer.stride, layer.dilation, strict=True)
    ):
        extent, size, steps = dilation * (kernel - 1), image.shape[2 + axis], response.shape[2 + axis]
        if isinstance(layer.padding, str):
            left = extent // 2 if layer.padding == "same" else 0
            right = extent - left if layer.padding == "same" else 0
        else:
            left = right = layer.padding[axis]
        unread = size + left + right - (max(steps, 1) - 1) * stride - extent - 1
        sides.append((left, right if unread < stride else right - unread))
    if layer.padding_mode == "zeros" and all(left == right for left, right in sides):
        return image, response, [left for left, _ in sides]
    mode = "constant" if layer.padding_mode == "zeros" else layer.padding_mode
    image = F.pad(image, [each for side in reversed(sides) for each in side], mode)
    return image, response, [0] * len(sides)


def _kernel_gradients(layer: _ConvNd, activation: Tensor, grad: Tensor) -> Tensor:
    """Call the backward operator directly: automatic differentiation would compute the layer's output once more."""
    image, response, padding = image_and_response(layer, activation, grad)
    shape = activation.new_empty(layer.weight.shape)  # the operator reads only the shape of the weight
    weight = (
        _as_same_kind(activation, layer.weight.detach().to(activation.dtype))
        if isinstance(activation, DTensor)
        else shape
    )
    geometry = _geometry(layer, padding)

    def gradient_of_sample(x: Tensor, g: Tensor) -> Tensor:
        return _backward(g.unsqueeze(0), x.unsqueeze(0), weight, None, *geometry, (False, True, False))[1]

    mapped: Tensor = vmap(gradient_of_sample)(image, response)
    return mapped


def _geometry(layer: _ConvNd, padding: list[int]) -> tuple[Any, ...]:
    """Return the arguments of the convolution that maps the image to the response."""
    return layer.stride, padding, layer.dilation, False, [0] * len(padding), layer.groups


_backward: Callable[..., tuple[Tensor, ...]] = torch.ops.aten.convolution_backward.default


def _normalised(layer: Norm, activation: Tensor) -> Tensor:
    """Return the values that the layer multiplies by its weight."""
    if isinstance(layer, nn.GroupNorm):
        return F.group_norm(activation, layer.num_groups, None, None, layer.eps)
    if isinstance(layer, nn.LayerNorm):
        return F.layer_norm(activation, layer.normalized_shape, None, None, layer.eps)
    if layer.running_mean is None or layer.running_var is None:
        return F.instance_norm(activation, eps=layer.eps)
    mean, variance = (_as_same_kind(activation, each) for each in (layer.running_mean, layer.running_var))
    return F.batch_norm(activation, mean, variance, eps=layer.eps)


def _sum_to_parameter(layer: nn.Module, values: Tensor) -> Tensor:
    """[B C *] -> [B C], and with the channels last [B * C] -> [B C]"""
    kept = 1 if isinstance(layer, nn.Linear) else 0
    if isinstance(layer, nn.LayerNorm):
        kept = len(layer.normalized_shape)
    summed = list(range(1, values.ndim - kept) if kept else range(2, values.ndim))
    return values.sum(summed) if summed else values


def _as_same_kind(activation: Tensor, held: Tensor) -> Tensor:
    """Return a tensor that a layer holds, replicated, as a DTensor or plain tensor like the layer's input."""
    if isinstance(activation, DTensor) and not isinstance(held, DTensor):
        return DTensor.from_local(
            held, activation.device_mesh, [Replicate()] * activation.device_mesh.ndim, run_check=False
        )
    return held.to_local() if isinstance(held, DTensor) and not isinstance(activation, DTensor) else held
