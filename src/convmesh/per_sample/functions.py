"""The public functions: per-sample gradients, their norms, and their clipped sum.

`batch` holds the arguments of one training step: the input of the model first, then what the loss takes besides the
output. All of it is mapped along dimension 0. The loss is called with single samples, each as a batch of one.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from .step import Loss, Step, Tensors


def per_sample_gradients(
    model: nn.Module, loss_fn: Loss, *batch: Any, chunk_size: int | None = None, randomness: str = "error"
) -> Tensors:
    """Compute the gradient of each sample's loss with respect to each trainable parameter.

    Args:
        model: A module in which the samples of a batch do not interact. With batch norm, only in eval mode.
        loss_fn: `loss_fn(output, *others)`. It is called with single samples, each as a batch of one, and must return
            one number.
        *batch: The input of the model, then what the loss takes besides the output. If the input is a tuple, it is the
            model's positional arguments, if a dict, its keyword arguments. Dimension 0 of every tensor is the batch;
            values that are no tensors are passed on unchanged. Plain tensors, or DTensors that are sharded over the
            batch, over space, or both.
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
    step = Step.of(model, loss_fn, batch)
    with step.same_algorithms():
        gradients = step.gradients(chunk_size, randomness)
    return (
        gradients
        if step.own_samples is None
        else {name: step.own_samples.wrap_samples(own) for name, own in gradients.items()}
    )


def per_sample_norms(model: nn.Module, loss_fn: Loss, *batch: Any) -> Tensor:
    """Compute the 2-norm of each sample's gradient over all trainable parameters.

    One forward and backward pass over the batch gives each layer's input and the gradient of its output. The norms are
    computed from these layer by layer, without the per-sample gradients where that is less work. Models with parameters
    outside of torch's own layers take the slower way, through `per_sample_gradients`, a limited number of samples at a
    time.

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
    step = Step.of(model, loss_fn, batch)
    with step.same_algorithms():
        norms = step.norms(step.by_layer(step.trainable))
    return norms if step.own_samples is None else step.own_samples.wrap_samples(norms)


def clipped_gradient(model: nn.Module, loss_fn: Loss, *batch: Any, max_norm: float) -> Tensors:
    """Sum the gradients of all samples, each scaled down to norm `max_norm` if it is longer: the sum of DP-SGD.

    No per-sample gradient is stored: the norms are computed first, then the sum of the scaled gradients, layer by layer
    where possible. Noise is not added; see [Differential privacy](privacy.md).

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
    step = Step.of(model, loss_fn, batch)
    with step.same_algorithms():
        gradients = step.clipped(max_norm)
    if step.layout is None:
        return gradients
    parameters = dict(model.named_parameters())
    return {name: step.layout.sum_samples(value, parameters[name]) for name, value in gradients.items()}
