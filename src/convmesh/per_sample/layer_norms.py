"""Norms of per-sample gradients, from the inputs of layers and the gradients of their outputs.

There are two ways to a norm. One computes the gradient itself. The other uses Gram matrices: let P [(c k) l] hold the
input patch at each place as a column, and R [o l] the gradient there. Then the squared norm of the gradient R P^T is
the sum over all entries of (P^T P) * (R^T R), and nothing has the size of the weight. P^T P needs no patches: with the
pixels X [c p], each of its entries is the sum over the kernel's taps of entries of X^T X.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce
from itertools import product
from math import prod
from operator import add

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Partial, Replicate, Shard
from torch.nn.modules.conv import _ConvNd

from .. import _torch
from ..sharding.layout import Layout
from ..sharding.redistribute import move
from .layer_calls import Use
from .layer_gradients import gradients_of, image_and_response, rows

# Size limit, in bytes, of intermediate results that are only needed for a norm.
WORKSPACE = 256 * 2**20


def squared_norms_of(uses: Sequence[Use]) -> Tensor:
    """Return [B]: the squared norms of a parameter's per-sample gradients, which are sums over its uses."""
    if len(uses) == 1:
        return squared_norms(*uses[0])

    def squares_of_sum(*operands: Tensor) -> Tensor:
        pairs = zip(uses, operands[::2], operands[1::2], strict=True)
        return squares_of(sum_of([gradients_of(layer, name, *pair) for (layer, name, *_), *pair in pairs]))

    (layer, name, *_), *_ = uses
    return _in_parts(squares_of_sum, layer.get_parameter(name).numel(), *(each for use in uses for each in use[2:]))


def sum_of(tensors: Sequence[Tensor]) -> Tensor:
    return reduce(add, tensors)


def squared_norms(layer: nn.Module, name: str, activation: Tensor, grad: Tensor) -> Tensor:
    """Return [B]: the squared norms of the per-sample gradients of a parameter in one layer call."""
    if len(activation) == 0:
        return grad.new_zeros(0)
    activation = activation if isinstance(layer, nn.Embedding) else activation.to(grad.dtype)  # as autocast did
    if isinstance(activation, DTensor) and isinstance(grad, DTensor):
        return _sharded_norms(layer, name, _without_partial(activation), _without_partial(grad))
    if name == "weight" and isinstance(layer, nn.Embedding):
        return _embedding_norms(layer, activation, grad)
    if name == "weight" and isinstance(layer, nn.Linear | _ConvNd):
        by_gram, by_gradient, elements = _work(layer, activation, grad)
        if by_gram < by_gradient:
            return _in_parts(lambda x, g: _gram_norms(layer, x, g), elements, activation, grad)
    return _by_gradient(layer, name, activation, grad)


def _by_gradient(layer: nn.Module, name: str, activation: Tensor, grad: Tensor) -> Tensor:
    size = layer.get_parameter(name).numel()
    return _in_parts(lambda x, g: squares_of(gradients_of(layer, name, x, g)), size, activation, grad)


def _in_parts(function: Callable[..., Tensor], elements: int, *operands: Tensor) -> Tensor:
    """Apply `function` to parts of the batch, so that its intermediate results, `elements` per sample, are bounded."""
    batch, at_once = len(operands[0]), max(1, WORKSPACE // (elements * operands[1].element_size()))
    if batch <= at_once:
        return function(*operands)
    parts = zip(*(each.split(at_once) for each in operands), strict=True)
    return torch.cat([function(*part) for part in parts])


def squares_of(gradients: Tensor) -> Tensor:
    """[B ...] -> [B]. Partial gradients are reduce-scattered, not all-reduced, as only their squares are needed."""
    if isinstance(gradients, DTensor):
        scattered = [Shard(1) if isinstance(each, Partial) else each for each in gradients.placements]
        gradients = gradients.redistribute(placements=scattered)
    norms = gradients.square().sum(list(range(1, gradients.ndim)))
    return _without_partial(norms) if isinstance(norms, DTensor) else norms


def _work(layer: nn.Module, activation: Tensor, grad: Tensor) -> tuple[int, int, int]:
    """Return, per sample, the multiplications by Gram matrices and by the gradient, and the Gram matrices' elements.

    They depend on shapes alone, so that all ranks choose alike.
    """
    if isinstance(layer, nn.Linear):
        places, both = prod(activation.shape[1:-1]), layer.in_features + layer.out_features
        return places**2 * both, places * layer.in_features * layer.out_features, 2 * places**2
    assert isinstance(layer, _ConvNd)
    o, c, taps = layer.weight.shape[0] // layer.groups, layer.weight.shape[1], prod(layer.kernel_size)
    response = (activation if layer.transposed else grad).shape[2:]
    pixels = prod(size if k == 1 else (size - 1) * s + d * (k - 1) + 1 for size, k, s, d in _axes(layer, response))
    places = prod(response)
    by_gram = layer.groups * (pixels**2 * c + places**2 * (o + taps))
    return by_gram, layer.groups * places * c * taps * o, layer.groups * (pixels**2 + 2 * places**2)


def _axes(layer: _ConvNd, response: Sequence[int]) -> list[tuple[int, int, int, int]]:
    return list(zip(response, layer.kernel_size, layer.stride, layer.dilation, strict=True))


def _gram_norms(layer: nn.Module, activation: Tensor, grad: Tensor) -> Tensor:
    if isinstance(layer, nn.Linear):
        a, r = rows(activation), rows(grad)
        return (a @ a.mT * (r @ r.mT)).sum((1, 2))
    assert isinstance(layer, _ConvNd)
    image, response, padding = image_and_response(layer, activation, grad)
    image = F.pad(image, [each for each in reversed(padding) for _ in range(2)])
    axes = _axes(layer, response.shape[2:])
    for axis, (size, k, s, d) in enumerate(axes, 2):
        if k == 1:  # places do not share pixels
            image = image[(slice(None),) * axis + (slice(0, (size - 1) * s + 1, s),)]
            axes[axis - 2] = size, 1, 1, 1
        else:
            image = image.narrow(axis, 0, (size - 1) * s + d * (k - 1) + 1)
    pixels, places = (each.flatten(2).unflatten(1, (layer.groups, -1)) for each in (image, response))
    of_pixels = (pixels.mT @ pixels).unflatten(3, image.shape[2:]).unflatten(2, image.shape[2:])
    seen = [
        tuple(slice(t * d, t * d + (size - 1) * s + 1, s) for t, (size, _, s, d) in zip(tap, axes, strict=True))
        for tap in product(*(range(k) for _, k, _, _ in axes))
    ]
    of_patches = sum_of([of_pixels[(slice(None), slice(None), *tap, *tap)] for tap in seen])
    of_responses: Tensor = places.mT @ places
    return (of_patches.reshape_as(of_responses) * of_responses).sum((1, 2, 3))


def _embedding_norms(layer: nn.Embedding, activation: Tensor, grad: Tensor) -> Tensor:
    """Compute the squared norms of an embedding's gradients: equal tokens of a sample add to the same row."""
    tokens, grads = activation.reshape(len(activation), -1), rows(grad)
    if layer.padding_idx is not None:
        grads = grads * (tokens != layer.padding_idx).unsqueeze(-1)
    own = torch.arange(len(tokens), device=tokens.device).unsqueeze(1) * layer.num_embeddings
    found, row = torch.unique(tokens + own, return_inverse=True)
    summed = grads.new_zeros(len(found), grads.shape[2]).index_add(0, row.flatten(), grads.flatten(0, 1))
    return grads.new_zeros(len(tokens)).index_add(0, found // layer.num_embeddings, summed.square().sum(1))


def _sharded_norms(layer: nn.Module, name: str, activation: DTensor, grad: DTensor) -> Tensor:
    """Compute squared norms on full samples, each on one rank, if they are there already or are small enough.

    Small means smaller than the gradient, which would have to be reduced otherwise. Replicated samples are distributed
    over the ranks too: so each norm is computed once, and has the same bits on all ranks.
    """
    mesh, ndim = activation.device_mesh, activation.device_mesh.ndim
    samples = [Shard(0) if each == Shard(0) else Replicate() for each in activation.placements]
    of_sample = prod(activation.shape[1:]) + prod(grad.shape[1:])
    on_one_rank = set(activation.placements) | set(grad.placements) <= {Shard(0), Replicate()}
    if on_one_rank or isinstance(layer, nn.Embedding) or of_sample <= layer.get_parameter(name).numel():
        layouts = [Layout.of(_torch.spec_of(each)).placed([Shard(0)] * ndim) for each in (activation, grad)]
        own = squared_norms(layer, name, move(activation, layouts[0]), move(grad, layouts[1]))
        shape = torch.Size([len(activation)])
        norms: Tensor = DTensor.from_local(own, mesh, [Shard(0)] * ndim, run_check=False, shape=shape, stride=(1,))
    else:
        norms = _by_gradient(layer, name, activation, grad)
    assert isinstance(norms, DTensor)
    return norms.redistribute(mesh, samples)


def _without_partial(tensor: DTensor) -> DTensor:
    return tensor.redistribute(
        placements=[Replicate() if isinstance(each, Partial) else each for each in tensor.placements]
    )
