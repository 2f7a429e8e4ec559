"""Norms of per-sample gradients from what each layer reads and the gradient of what it writes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Replicate
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


def gradients_by_layer(
    model: nn.Module, trainable: Sequence[str], total_loss: Callable[[Tensor], Tensor], x: Tensor
) -> dict[str, Tensor] | None:
    """Each parameter's [B ...], or None as above, and where some parameter gets no gradient at all."""
    calls = calls_of_layers(model, trainable, total_loss, x)
    if calls is None or any(call.grad is None for call in calls):
        return None
    prefixes = {id(module): f"{name}." if name else "" for name, module in model.named_modules()}
    found = {}
    for call in calls:
        own = [name for name, value in call.layer.named_parameters() if value.requires_grad]
        assert call.grad is not None
        for name, value in _gradients(call.layer, own, call.read, call.grad).items():
            found[prefixes[id(call.layer)] + name] = value
    return {name: found[name] for name in trainable} if found.keys() == set(trainable) else None


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
    cut = any(isinstance(held, DTensor) and set(held.placements) != {Replicate()} for held in _held(owners.values()))
    return list(owners.values()) if known and not cut else None


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
    unusual = (
        isinstance(read, DTensor) or layer.transposed or layer.padding_mode != "zeros" or isinstance(layer.padding, str)
    )
    (outputs, c, *size), places = layer.weight.shape, prod(grad.shape[2:])
    gradient = c * prod(size), outputs // layer.groups
    if unusual or places * sum(gradient) >= prod(gradient):
        return _norms_of_gradients(layer, ["weight"], read, grad, limit)
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


def _norms_of_gradients(layer: nn.Module, names: Sequence[str], read: Tensor, grad: Tensor, limit: int) -> Tensor:
    """From the gradients of this one layer, of a bounded number of samples at a time."""
    per_sample = sum(value.numel() * value.element_size() for name, value in layer.named_parameters() if name in names)
    at_once = max(1, limit // per_sample)
    parts = []
    for x, g in zip(read.split(at_once), grad.split(at_once), strict=True):
        gradients = _gradients(layer, names, x, g).values()
        parts.append(torch.stack([value.flatten(1).square().sum(1) for value in gradients]).sum(0))
    return torch.cat(parts)


def _gradients(layer: nn.Module, names: Sequence[str], read: Tensor, grad: Tensor) -> dict[str, Tensor]:
    """[B ...] of this one layer."""
    if isinstance(layer, nn.GroupNorm | nn.LayerNorm | _InstanceNorm):
        made = {"weight": _normalised(layer, read) * grad, "bias": grad}
        return {name: _sum_to_parameter(layer, made[name]) for name in names}
    parameters = {name: _beside(read, value.detach()) for name, value in layer.named_parameters()}
    wanted = {name: parameters[name] for name in names}

    def one(x: Tensor, g: Tensor) -> dict[str, Tensor]:
        def call(some: dict[str, Tensor]) -> Tensor:
            written: Tensor = functional_call(layer, {**parameters, **some}, (x.unsqueeze(0),))
            return written

        (gradients,) = vjp(call, wanted)[1](g.unsqueeze(0))
        return cast(dict[str, Tensor], gradients)

    mapped: dict[str, Tensor] = vmap(one)(read, grad)
    return mapped


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
