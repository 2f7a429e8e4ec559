"""Gradients of each sample of a batch: the gradients themselves, their norms, and their clipped sum.

`batch` is what one training step has: the input of the model first, then whatever the loss takes beside the output.
All of it is mapped along dimension 0. The loss is called with single samples, each as a batch of one.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.func import functional_call, grad

from .layer_gradients import gradients_by_layer
from .layer_norms import squared_norms_by_layer
from .machines import agreed_on
from .samples import batch_size, check_samples_are_independent, mapped, parameters_of, single_number
from .spread import Spread, settled

Loss = Callable[..., Tensor]
Tensors = dict[str, Tensor]

# Of the gradients that are made only to take their norm, this many bytes at a time.
GRADIENT_LIMIT = 256 * 2**20


def per_sample_gradients(
    model: nn.Module, loss_fn: Loss, *batch: Tensor, chunk_size: int | None = None, randomness: str = "error"
) -> Tensors:
    """Compute the gradient of each sample's loss with respect to each trainable parameter.

    Args:
        model: A module in which the samples of a batch do not interact. With batch norm, only in eval mode.
        loss_fn: `loss_fn(output, *others)`. It is called with single samples, each as a batch of one, and must return
            one number.
        *batch: The input of the model, then what the loss takes beside the output. Dimension 0 of all of them is the
            batch. Plain tensors or DTensors, sharded over the batch, over space, or both.
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
    check_samples_are_independent(model)
    batch_size(batch)
    spread, trainable, fixed, batch = _placed(model, batch)
    if spread is not None and not spread.samples_are_local:
        # torch's own rules for losses and norms under vmap write in place, which no DTensor can.
        by_layer = gradients_by_layer(model, list(trainable), _total(model, loss_fn, trainable, fixed, batch), batch[0])
        if by_layer is not None:
            return by_layer
    with _choosing_alike(spread):
        gradients = _gradients(model, loss_fn, trainable, fixed, batch, chunk_size, randomness)
    if spread is None or not spread.samples_are_local:
        return gradients
    return {name: spread.by_sample(own) for name, own in gradients.items()}


def _gradients(
    model: nn.Module,
    loss_fn: Loss,
    trainable: Tensors,
    fixed: Tensors,
    batch: tuple[Tensor, ...],
    chunk_size: int | None = None,
    randomness: str = "error",
) -> Tensors:
    if batch[0].shape[0] == 0:
        return {name: value.new_zeros((0, *value.shape)) for name, value in trainable.items()}

    def sample_loss(parameters: Tensors, *sample: Tensor) -> Tensor:
        x, *others = (each.unsqueeze(0) for each in sample)
        return single_number(loss_fn(functional_call(model, {**parameters, **fixed}, (x,)), *others))

    gradients: Tensors = mapped(
        partial(grad(sample_loss), trainable), *batch, chunk_size=chunk_size, randomness=randomness
    )
    return gradients


def per_sample_norms(model: nn.Module, loss_fn: Loss, *batch: Tensor) -> Tensor:
    """Compute the 2-norm of each sample's gradient over all trainable parameters.

    One backward pass over the batch gives each layer's input and the gradient of its output. The norms follow from
    these layer by layer, without the per-sample gradients. Models with shared parameters or unknown layers take the
    slower way, through `per_sample_gradients`, a limited number of samples at a time.

    Args:
        model: As in `per_sample_gradients`.
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
    check_samples_are_independent(model)
    batch_size(batch)
    spread, trainable, fixed, batch = _placed(model, batch)
    with _choosing_alike(spread):
        norms = _norms(model, loss_fn, trainable, fixed, batch)
    return norms if spread is None or not spread.samples_are_local else spread.by_sample(norms)


def _norms(model: nn.Module, loss_fn: Loss, trainable: Tensors, fixed: Tensors, batch: tuple[Tensor, ...]) -> Tensor:
    if batch[0].shape[0] == 0:
        return next(iter(trainable.values())).new_zeros(0)

    total_loss = _total(model, loss_fn, trainable, fixed, batch)
    squares = squared_norms_by_layer(model, list(trainable), total_loss, batch[0], GRADIENT_LIMIT)
    if squares is None:
        squares = _squares_of_gradients(model, loss_fn, trainable, fixed, batch)
    return squares.sqrt()


def _total(
    model: nn.Module, loss_fn: Loss, trainable: Tensors, fixed: Tensors, batch: tuple[Tensor, ...]
) -> Callable[[Tensor], Tensor]:
    def total_loss(x: Tensor) -> Tensor:
        return _losses(loss_fn, functional_call(model, {**trainable, **fixed}, (x,)), batch[1:]).sum()

    return total_loss


def clipped_gradient(model: nn.Module, loss_fn: Loss, *batch: Tensor, max_norm: float) -> Tensors:
    """Sum the gradients of all samples, each scaled down to norm `max_norm` if it is longer: the sum of DP-SGD.

    No per-sample gradient is stored: the norms are computed first, then one backward pass of the scaled losses. Noise
    is not added; see [Differential privacy](privacy.md).

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
    check_samples_are_independent(model)
    batch_size(batch)
    spread, trainable, fixed, batch = _placed(model, batch)
    with _choosing_alike(spread):
        gradients = _clipped(model, loss_fn, trainable, fixed, batch, max_norm)
    if spread is None:
        return gradients
    parameters = dict(model.named_parameters())
    return {name: spread.summed(value, parameters[name]) for name, value in gradients.items()}


def _clipped(
    model: nn.Module, loss_fn: Loss, trainable: Tensors, fixed: Tensors, batch: tuple[Tensor, ...], max_norm: float
) -> Tensors:
    if batch[0].shape[0] == 0:
        return {name: torch.zeros_like(value) for name, value in trainable.items()}
    norms = _norms(model, loss_fn, trainable, fixed, batch)
    scales = (max_norm / norms.clamp(min=torch.finfo(norms.dtype).tiny)).clamp(max=1)

    leaves = {name: value.detach().requires_grad_() for name, value in trainable.items()}
    with torch.enable_grad():
        output = functional_call(model, {**leaves, **fixed}, (batch[0],))
        scaled = (_losses(loss_fn, output, batch[1:]) * scales).sum()
    gradients = torch.autograd.grad(scaled, list(leaves.values()), materialize_grads=True)
    return dict(zip(leaves, gradients, strict=True))


def _placed(model: nn.Module, batch: tuple[Tensor, ...]) -> tuple[Spread | None, Tensors, Tensors, tuple[Tensor, ...]]:
    """Parameters, all else that the model holds, and the batch: of DTensors, as this rank is to compute with them."""
    trainable, fixed = parameters_of(model)
    spread = Spread.of(batch)
    if spread is None:
        return None, trainable, fixed, batch
    if spread.samples_are_local:
        return spread, spread.own(trainable), spread.own(fixed), tuple(each.to_local() for each in batch)  # type: ignore[attr-defined]
    everywhere: list[Tensors] = [
        {name: spread.everywhere(value) for name, value in each.items()} for each in (trainable, fixed)
    ]
    return spread, everywhere[0], everywhere[1], batch


def _choosing_alike(spread: Spread | None) -> AbstractContextManager[None]:
    """Ranks that have the same samples get the same bits."""
    return nullcontext() if spread is None else agreed_on(spread.mesh, spread.placements)


def _losses(loss_fn: Loss, output: Tensor, others: tuple[Tensor, ...]) -> Tensor:
    """[B], each from a batch of one."""

    def one(*sample: Tensor) -> Tensor:
        return single_number(loss_fn(*(each.unsqueeze(0) for each in sample)))

    if isinstance(output, DTensor):
        output = settled(output, others)
    spread = Spread.of((output, *others))
    if spread is not None and spread.samples_are_local:
        own: Tensor = mapped(one, *(each.to_local() for each in (output, *others)))  # type: ignore[attr-defined]
        return DTensor.from_local(
            own, spread.mesh, spread.placements, run_check=False, shape=torch.Size([spread.batch]), stride=(1,)
        )
    losses: Tensor = mapped(one, output, *others)
    return losses


def _squares_of_gradients(
    model: nn.Module, loss_fn: Loss, trainable: Tensors, fixed: Tensors, batch: tuple[Tensor, ...]
) -> Tensor:
    """A bounded number of samples at a time."""
    per_sample = sum(value.numel() * value.element_size() for value in trainable.values())
    at_once = max(1, GRADIENT_LIMIT // per_sample)
    parts = []
    for part in zip(*(tensor.split(at_once) for tensor in batch), strict=True):
        gradients = _gradients(model, loss_fn, trainable, fixed, part)
        parts.append(sum((each.flatten(1).square().sum(1) for each in gradients.values()), torch.zeros(())))
    return torch.cat([torch.as_tensor(part) for part in parts])
