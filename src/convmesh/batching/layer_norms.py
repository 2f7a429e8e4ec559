"""Norms of per-sample gradients from what each layer reads and the gradient of what it writes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.modules.conv import _ConvNd

from ..geometry import Convolution
from ._functorch import Nature
from .algorithms import Task
from .contraction import Contraction, Role
from .layer_calls import calls_of_layers
from .layer_gradients import gradients_of, is_usual
from .machines import OWN
from .patches import View


def squared_norms_by_layer(
    model: nn.Module, trainable: Sequence[str], total_loss: Callable[[Tensor], Tensor], x: Tensor, limit: int
) -> Tensor | None:
    """[B], or None where the layers cannot tell: parameters that are shared, unknown, or used more than once."""
    calls = calls_of_layers(model, trainable, total_loss, x)
    if calls is None:
        return None
    total = torch.zeros((), device=x.device)
    for call in calls:
        if call.grad is not None:
            norms = layer_norms(call.layer, call.read, call.grad, limit)
            total = norms if total.ndim == 0 else total + norms
    return total if total.ndim else None


def layer_norms(layer: nn.Module, read: Tensor, grad: Tensor, limit: int) -> Tensor:
    """[B]: the squared norm of the gradient that each sample gives the layer's trainable parameters."""
    # In order: ranks that walk through a set may communicate in different orders.
    own = [name for name, value in layer.named_parameters() if value.requires_grad]
    total = grad.new_zeros(grad.shape[0])
    if "bias" in own and isinstance(layer, nn.Linear | _ConvNd):
        summed = _rows(grad).sum(1) if isinstance(layer, nn.Linear) else grad.flatten(2).sum(2)
        total = total + summed.square().sum(1)
        own.remove("bias")
    if "weight" in own and isinstance(layer, nn.Linear):
        total = total + _matrix_norms(_rows(read).mT.unsqueeze(1), _rows(grad).mT.unsqueeze(1))
        own.remove("weight")
    if "weight" in own and isinstance(layer, nn.Embedding):
        total = total + _embedding_norms(layer, read, grad)
        own.remove("weight")
    if "weight" in own and isinstance(layer, _ConvNd):
        total = total + _kernel_norms(layer, read, grad, limit)
        own.remove("weight")
    return total + _norms_of_gradients(layer, own, read, grad, limit) if own else total


def _rows(tensor: Tensor) -> Tensor:
    """[B ... C] -> [B T C]"""
    return tensor.reshape(tensor.shape[0], -1, tensor.shape[-1])


def _matrix_norms(read: Tensor, grad: Tensor) -> Tensor:
    """[B g a T] [B g o T] -> [B], the squared norm of grad @ read^T by the smaller of two products."""
    a, o, places = read.shape[2], grad.shape[2], read.shape[3]
    if places * (a + o) < a * o:
        return (read.mT @ read * (grad.mT @ grad)).sum((1, 2, 3))
    return (grad @ read.mT).square().sum((1, 2, 3))


def _embedding_norms(layer: nn.Embedding, read: Tensor, grad: Tensor) -> Tensor:
    """Only places that hold the same token meet in one row of the gradient."""
    tokens, grads = read.reshape(read.shape[0], -1), _rows(grad)
    if layer.padding_idx is not None:
        grads = grads * (tokens != layer.padding_idx).unsqueeze(-1)
    same = tokens.unsqueeze(1) == tokens.unsqueeze(2)
    return (grads @ grads.mT * same).sum((1, 2))


def _kernel_norms(layer: _ConvNd, read: Tensor, grad: Tensor, limit: int) -> Tensor:
    """By gram matrices [l l] of patches and gradient where these are less work than the gradient [o (c k)]."""
    unusual = isinstance(read, DTensor) or not is_usual(layer)
    (outputs, c, *size), places = layer.weight.shape, prod(grad.shape[2:])
    gradient = c * prod(size), outputs // layer.groups
    if unusual or places * sum(gradient) >= prod(gradient):
        return _norms_of_gradients(layer, ["weight"], read, grad, limit)
    padding = cast(tuple[int, ...], layer.padding)
    geometry = Convolution.of(len(size), layer.stride, padding, layer.dilation, False, (0,), layer.groups)
    shapes = ((1, *read.shape[1:]), tuple(layer.weight.shape), (1, *grad.shape[1:]))
    contraction = Contraction(Role.KERNEL, geometry, *shapes)
    view = View(Task(contraction, len(read), (True, True), Nature.PLAIN, "", 0, "", 0, OWN))
    at_once = max(1, limit // (read.element_size() * layer.groups * places * (gradient[0] + 2 * places)))
    parts = []
    for x, g in zip(read.split(at_once), grad.split(at_once), strict=True):
        patches = view.patches(x.unsqueeze(1)).unflatten(0, (-1, layer.groups))
        responses = view.response_matrix(g.unsqueeze(1)).unflatten(0, (-1, layer.groups))
        parts.append(_matrix_norms(patches, responses))
    return torch.cat(parts)


def _norms_of_gradients(layer: nn.Module, names: Sequence[str], read: Tensor, grad: Tensor, limit: int) -> Tensor:
    """From the gradients of this one layer, of a bounded number of samples at a time."""
    per_sample = sum(value.numel() * value.element_size() for name, value in layer.named_parameters() if name in names)
    at_once = max(1, limit // per_sample)
    parts = []
    for x, g in zip(read.split(at_once), grad.split(at_once), strict=True):
        gradients = gradients_of(layer, names, x, g).values()
        parts.append(torch.stack([value.flatten(1).square().sum(1) for value in gradients]).sum(0))
    return torch.cat(parts)
