"""Gradients of each sample of a batch: the gradients themselves, their norms, and their clipped sum.

`batch` is what one training step has: the input of the model first, then whatever the loss takes beside the output.
All of it is mapped along dimension 0. The loss is called with single samples, each as a batch of one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, replace
from functools import partial
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad
from torch.utils._pytree import tree_map_only

from ..batching.machines import agreed_on
from . import samples
from .layer_calls import Use, run_by_layer
from .layer_gradients import gradients_of, scaled_sum
from .layer_norms import WORKSPACE, squared_norms_of, squares_of, sum_of
from .samples import UnmappableError, batch_size
from .spread import Spread

Loss = Callable[..., Tensor]
Tensors = dict[str, Tensor]


def per_sample_gradients(
    model: nn.Module, loss_fn: Loss, *batch: Any, chunk_size: int | None = None, randomness: str = "error"
) -> Tensors:
    """Compute the gradient of each sample's loss with respect to each trainable parameter.

    Args:
        model: A module in which the samples of a batch do not interact. With batch norm, only in eval mode.
        loss_fn: `loss_fn(output, *others)`. It is called with single samples, each as a batch of one, and must return
            one number.
        *batch: The input of the model, then what the loss takes beside the output. A tuple as the first is the model's
            positional arguments, a dict its keyword arguments. Dimension 0 of every tensor in all of these is the
            batch; what is no tensor is passed on as it is. Plain tensors or DTensors, sharded over the batch, over
            space, or both.
        chunk_size: As in `torch.func.vmap`: how many samples to compute at once.
        randomness: As in `torch.func.vmap`: use "different" for a model with dropout.

    Returns:
        A tensor of shape `(B, *parameter.shape)` by parameter name. For a sharded batch these are DTensors.

    Raises:
        ValueError: A layer mixes the samples, the model has no trainable parameter, the batch sizes differ, or the loss
            of a sample is not one number.

    Examples:
        >>> model = nn.Conv2d(1, 2, 3)
        >>> images, targets = torch.randn(4, 1, 8, 8), torch.randn(4, 2, 6, 6)
        >>> gradients = convmesh.per_sample_gradients(model, F.mse_loss, images, targets)
        >>> {name: tuple(gradient.shape) for name, gradient in gradients.items()}
        {'weight': (4, 2, 1, 3, 3), 'bias': (4, 2)}
    """
    step = _Step.of(model, loss_fn, batch)
    with step.choosing_alike():
        gradients = step.gradients(chunk_size, randomness)
    return (
        gradients
        if step.own_samples is None
        else {name: step.own_samples.by_sample(own) for name, own in gradients.items()}
    )


def per_sample_norms(model: nn.Module, loss_fn: Loss, *batch: Any) -> Tensor:
    """Compute the 2-norm of each sample's gradient over all trainable parameters.

    One backward pass over the batch gives each layer's input and the gradient of its output. The norms follow from
    these layer by layer, without the per-sample gradients where that is less work. Models with parameters outside of
    torch's own layers take the slower way, through `per_sample_gradients`, a limited number of samples at a time.

    Args:
        model: As in `per_sample_gradients`. Layers read the batch in dimension 0.
        loss_fn: As in `per_sample_gradients`.
        *batch: As in `per_sample_gradients`.

    Returns:
        A tensor of shape `(B,)`. For a sharded batch, a DTensor.

    Raises:
        ValueError: As in `per_sample_gradients`.

    Examples:
        >>> model = nn.Conv2d(1, 2, 3)
        >>> images, targets = torch.randn(4, 1, 8, 8), torch.randn(4, 2, 6, 6)
        >>> tuple(convmesh.per_sample_norms(model, F.mse_loss, images, targets).shape)
        (4,)
    """
    step = _Step.of(model, loss_fn, batch)
    with step.choosing_alike():
        norms = step.norms(step.by_layer(step.trainable))
    return norms if step.own_samples is None else step.own_samples.by_sample(norms)


def clipped_gradient(model: nn.Module, loss_fn: Loss, *batch: Any, max_norm: float) -> Tensors:
    """Sum the gradients of all samples, each scaled down to norm `max_norm` if it is longer: the sum of DP-SGD.

    No per-sample gradient is stored: the norms are computed first, then the sum of the scaled gradients, a layer at a
    time where that can be. Noise is not added; see [Differential privacy](privacy.md).

    Args:
        model: As in `per_sample_gradients`.
        loss_fn: As in `per_sample_gradients`.
        *batch: As in `per_sample_gradients`.
        max_norm: The greatest norm that one sample may contribute.

    Returns:
        The sum by parameter name. Divide it by the batch size yourself if you need the mean. For a sharded batch,
        DTensors summed over all ranks.

    Raises:
        ValueError: `max_norm` is not positive, or as in `per_sample_gradients`.

    Examples:
        >>> model = nn.Conv2d(1, 2, 3)
        >>> images, targets = torch.randn(4, 1, 8, 8), torch.randn(4, 2, 6, 6)
        >>> total = convmesh.clipped_gradient(model, F.mse_loss, images, targets, max_norm=0.1)
        >>> sum(gradient.square().sum() for gradient in total.values()).sqrt().item() <= 4 * 0.1
        True
    """
    if not max_norm > 0:
        raise ValueError(f"`max_norm` (={max_norm}) must be positive")
    step = _Step.of(model, loss_fn, batch)
    with step.choosing_alike():
        gradients = step.clipped(max_norm)
    if step.spread is None:
        return gradients
    parameters = dict(model.named_parameters())
    return {name: step.spread.summed(value, parameters[name]) for name, value in gradients.items()}


@dataclass(frozen=True)
class _Step:
    """A model, its loss and a batch: of DTensors, as this rank is to compute with them."""

    model: nn.Module
    loss_fn: Loss
    batch: tuple[Any, ...]
    trainable: Tensors
    fixed: Tensors  # all else that the model holds
    spread: Spread | None

    @classmethod
    def of(cls, model: nn.Module, loss_fn: Loss, batch: tuple[Any, ...]) -> _Step:
        samples.check_independent(model)
        batch_size(batch)
        trainable, fixed = samples.parameters_of(model)
        spread = Spread.of(samples.tensors_of(batch))
        if spread is not None and spread.samples_are_local:
            trainable, fixed, batch = spread.own(trainable), spread.own(fixed), samples.local_parts(batch)
        elif spread is not None:
            trainable = {name: spread.everywhere(value) for name, value in trainable.items()}
            fixed = {name: spread.everywhere(value) for name, value in fixed.items()}
        return cls(model, loss_fn, batch, trainable, fixed, spread)

    @property
    def own_samples(self) -> Spread | None:
        """Where the samples of other ranks are, if this rank computes with plain tensors and only some of them."""
        return self.spread if self.spread is not None and self.spread.samples_are_local else None

    @property
    def has_plain_tensors(self) -> bool:
        return self.spread is None or self.own_samples is not None

    def choosing_alike(self) -> AbstractContextManager[None]:
        """Ranks that have the same samples get the same bits."""
        return nullcontext() if self.spread is None else agreed_on(self.spread.mesh, self.spread.placements)

    def output(self, trainable: Tensors, inputs: Any) -> Any:
        kwargs = inputs if isinstance(inputs, dict) else {}
        args = inputs if isinstance(inputs, tuple) else () if kwargs else (inputs,)
        return functional_call(self.model, {**trainable, **self.fixed}, args, kwargs)

    def losses(self, trainable: Tensors) -> Tensor:
        """[B]"""
        return samples.losses_of(self.loss_fn, self.output(trainable, self.batch[0]), *self.batch[1:])

    def by_layer(self, trainable: Tensors, keep_graph: bool = False) -> tuple[Tensor, dict[str, list[Use]]] | None:
        size = batch_size(self.batch)
        return run_by_layer(self.model, trainable, partial(self.losses, trainable), size, keep_graph) if size else None

    def parts(self, at_once: int) -> Iterator[_Step]:
        for start in range(0, batch_size(self.batch), at_once):
            own = itemgetter(slice(start, start + at_once))
            yield replace(self, batch=tree_map_only(Tensor, own, self.batch))

    def gradients(self, chunk_size: int | None, randomness: str) -> Tensors:
        size = batch_size(self.batch)
        if size == 0:
            return {name: value.new_zeros((0, *value.shape)) for name, value in self.trainable.items()}
        # torch's own rules for losses and norms under vmap write in place, which no DTensor can.
        if self.has_plain_tensors:
            with suppress(UnmappableError):
                return self.gradients_by(samples.mapped, chunk_size=chunk_size, randomness=randomness)
        parts = [each.gradients_by_layer() for each in self.parts(chunk_size or size)]
        return {name: torch.cat([part[name] for part in parts]) for name in self.trainable}

    def gradients_by(self, way: Callable[..., Any], **options: Any) -> Tensors:
        def loss(parameters: Tensors, *sample: Any) -> Tensor:
            inputs, *others = tree_map_only(Tensor, lambda each: each.unsqueeze(0), sample)
            return samples.single_number(self.loss_fn(self.output(parameters, inputs), *others))

        gradients: Tensors = way(partial(grad(loss), self.trainable), *self.batch, **options)
        return gradients

    def gradients_by_layer(self) -> Tensors:
        run = self.by_layer(self.trainable)
        if run is None:
            return self.gradients_by(samples.one_by_one)
        size, found = batch_size(self.batch), {}
        for name, value in self.trainable.items():
            each = [gradients_of(*use) for use in run[1][name]]
            found[name] = sum_of(each) if each else value.new_zeros(size, *value.shape)
        return found

    def norms(self, run: tuple[Tensor, dict[str, list[Use]]] | None) -> Tensor:
        """[B]"""
        if run is not None:
            squares = [squared_norms_of(uses) for uses in run[1].values() if uses]
            return sum_of(squares).sqrt() if squares else run[0].detach() * 0
        at_once = max(1, WORKSPACE // sum(value.nbytes for value in self.trainable.values()))
        parts = [part.gradients(None, "error").values() for part in self.parts(at_once)]
        norms = [sum_of([squares_of(each) for each in part]).sqrt() for part in parts]
        return torch.cat(norms) if norms else next(iter(self.trainable.values())).new_zeros(0)

    def clipped(self, max_norm: float) -> Tensors:
        """Of one forward pass: another one might drop out something else.

        What layers read and write is enough for the sum, too. For DTensors and embeddings it takes another backward
        pass.
        """
        if batch_size(self.batch) == 0:
            return {name: torch.zeros_like(value) for name, value in self.trainable.items()}
        leaves = {name: value.detach().requires_grad_() for name, value in self.trainable.items()}
        sums_by_layer = self.has_plain_tensors and not any(
            isinstance(each, nn.Embedding) for each in self.model.modules()
        )
        run = self.by_layer(leaves, keep_graph=not sums_by_layer)
        norms = self.norms(run)
        scales = (max_norm / norms.clamp(min=torch.finfo(norms.dtype).tiny)).clamp(max=1)
        if run is not None and sums_by_layer:
            return {name: scaled_sum(run[1][name], scales, value) for name, value in self.trainable.items()}
        with torch.enable_grad():
            scaled = ((self.losses(leaves) if run is None else run[0]) * scales).sum()
        gradients = torch.autograd.grad(scaled, list(leaves.values()), materialize_grads=True)
        return dict(zip(leaves, gradients, strict=True))
