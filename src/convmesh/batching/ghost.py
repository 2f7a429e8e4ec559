"""Norms of per-sample gradients from what each layer reads and the gradient of what it writes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.func import functional_call, vjp, vmap
from torch.nn.modules.conv import _ConvNd
from torch.nn.modules.instancenorm import _InstanceNorm

from ..geometry import Convolution
from ._functorch import Nature
from .algorithms import Task
from .contraction import Contraction, Role
from .patches import View

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


def squared_norms_by_layer(
    model: nn.Module, trainable: set[str], total_loss: Callable[[Tensor], Tensor], x: Tensor, limit: int
) -> Tensor | None:
    """[B], or None where the layers cannot tell: parameters that are shared, unknown, or used more than once."""
    layers = _owners(model, trainable)
    if layers is None:
        return None
    calls = _calls(layers, total_loss, x)
    sizes = {call.read.shape[:1] for call in calls}
    if len(calls) != len({id(call.layer) for call in calls}) or sizes != {x.shape[:1]}:
        return None
    total = torch.zeros((), device=x.device)
    for call in calls:
        if call.grad is not None:
            total = total + layer_norms(call.layer, call.read, call.grad, limit)
    return total if total.ndim else None


def _owners(model: nn.Module, trainable: set[str]) -> list[nn.Module] | None:
    """The layers that hold the trainable parameters, if each has one owner, of a kind that we know."""
    names = [name for name, value in model.named_parameters(remove_duplicate=False) if value.requires_grad]
    if set(names) != trainable:
        return None
    owners = {id(owner): owner for owner in (model.get_submodule(name.rpartition(".")[0]) for name in names)}
    plain = all(isinstance(owner, LAYERS) and not _is_special(owner) for owner in owners.values())
    return list(owners.values()) if plain else None


def _is_special(layer: nn.Module) -> bool:
    """Parametrized layers compute their weight from others; some embeddings rescale theirs while reading."""
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


def layer_norms(layer: nn.Module, read: Tensor, grad: Tensor, limit: int) -> Tensor:
    """[B]: the squared norm of the gradient that each sample gives the layer's trainable parameters."""
    own = {name for name, value in layer.named_parameters() if value.requires_grad}
    total = grad.new_zeros(grad.shape[0])
    if "bias" in own and isinstance(layer, nn.Linear | _ConvNd):
        summed = _rows(grad).sum(1) if isinstance(layer, nn.Linear) else grad.flatten(2).sum(2)
        total = total + summed.square().sum(1)
        own.discard("bias")
    if "weight" in own and isinstance(layer, nn.Linear):
        total = total + _matrix_norms(_rows(read).mT.unsqueeze(1), _rows(grad).mT.unsqueeze(1))
        own.discard("weight")
    if "weight" in own and isinstance(layer, nn.Embedding):
        total = total + _embedding_norms(layer, read, grad)
        own.discard("weight")
    if "weight" in own and isinstance(layer, _ConvNd):
        total = total + _kernel_norms(layer, read, grad, limit)
        own.discard("weight")
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
    unusual = layer.transposed or layer.padding_mode != "zeros" or isinstance(layer.padding, str)
    (outputs, c, *size), places = layer.weight.shape, prod(grad.shape[2:])
    gradient = c * prod(size), outputs // layer.groups
    if unusual or places * sum(gradient) >= prod(gradient):
        return _norms_of_gradients(layer, {"weight"}, read, grad, limit)
    padding = cast(tuple[int, ...], layer.padding)
    geometry = Convolution.of(len(size), layer.stride, padding, layer.dilation, False, (0,), layer.groups)
    shapes = ((1, *read.shape[1:]), tuple(layer.weight.shape), (1, *grad.shape[1:]))
    contraction = Contraction(Role.KERNEL, geometry, *shapes)
    view = View(Task(contraction, len(read), (True, True), Nature.PLAIN, "", 0, "", 0))
    at_once = max(1, limit // (read.element_size() * layer.groups * places * (gradient[0] + 2 * places)))
    parts = []
    for x, g in zip(read.split(at_once), grad.split(at_once), strict=True):
        patches = view.patches(x.unsqueeze(1)).unflatten(0, (-1, layer.groups))
        responses = view.response_matrix(g.unsqueeze(1)).unflatten(0, (-1, layer.groups))
        parts.append(_matrix_norms(patches, responses))
    return torch.cat(parts)


def _norms_of_gradients(layer: nn.Module, names: set[str], read: Tensor, grad: Tensor, limit: int) -> Tensor:
    """From the gradients of this one layer, of a bounded number of samples at a time."""
    parameters = {name: value.detach() for name, value in layer.named_parameters()}
    wanted = {name: parameters[name] for name in names}

    def one(x: Tensor, g: Tensor) -> Tensor:
        def call(some: dict[str, Tensor]) -> Tensor:
            written: Tensor = functional_call(layer, {**parameters, **some}, (x.unsqueeze(0),))
            return written

        (gradients,) = vjp(call, wanted)[1](g.unsqueeze(0))
        return torch.stack([value.square().sum() for value in gradients.values()]).sum()

    per_sample = sum(value.numel() * value.element_size() for value in wanted.values())
    norms: Tensor = vmap(one, chunk_size=max(1, limit // per_sample))(read, grad)
    return norms
