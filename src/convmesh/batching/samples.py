"""Samples of a batch, one by one: whether that has a meaning, and calling a function with each of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import vmap
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.utils._pytree import tree_map


def check_samples_are_independent(model: nn.Module) -> None:
    """Refuse layers through which one sample's output depends on the others."""
    for name, module in model.named_modules():
        if isinstance(module, _BatchNorm) and (module.training or module.running_mean is None):
            raise ValueError(
                f"`{name or type(module).__name__}` is a batch norm that uses the statistics of the batch: every "
                "output depends on every sample, so no sample has a gradient of its own. Put it into eval mode, or use "
                "group norm in its place."
            )
        if isinstance(module, _InstanceNorm) and module.training and module.running_mean is not None:
            raise ValueError(
                f"`{name or type(module).__name__}` tracks running statistics, which all samples would write at once. "
                "Put it into eval mode, or make it with track_running_stats=False."
            )


def batch_size(batch: tuple[Tensor, ...]) -> int:
    if not batch:
        raise ValueError("`batch` is empty: give the input of the model, and what the loss takes beside the output")
    sizes = [tensor.shape[0] if tensor.ndim else None for tensor in batch]
    if len(set(sizes)) > 1 or sizes[0] is None:
        raise ValueError(f"the tensors of the batch must agree in their first size, but have {sizes}")
    return sizes[0]


def parameters_of(model: nn.Module) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Those to differentiate by, and all else that the model holds."""
    parameters = dict(model.named_parameters())
    trainable = {name: value.detach() for name, value in parameters.items() if value.requires_grad}
    if not trainable:
        raise ValueError("the model has no trainable parameter")
    fixed = {name: value.detach() for name, value in parameters.items() if name not in trainable}
    return trainable, {**fixed, **dict(model.named_buffers())}


def mapped(function: Callable[..., Any], *batch: Tensor, **options: Any) -> Any:
    """`vmap(function)(*batch)`; by a loop where torch cannot map what it does.

    That is, as a rule, a loss that makes a tensor of zeros and writes something of the sample into it.
    """
    try:
        return vmap(function, **options)(*batch)
    except RuntimeError as error:
        # A loop draws other random numbers for each sample: never unasked, nor where all are to have the same.
        if not str(error).startswith("vmap:") or "random" in str(error) or options.get("randomness") == "same":
            raise
    samples = [function(*sample) for sample in zip(*(each.unbind() for each in batch), strict=True)]
    return tree_map(lambda *each: torch.stack(each), *samples)


def single_number(loss: Tensor) -> Tensor:
    if loss.numel() != 1:
        raise ValueError(f"the loss of one sample must be one number, but has the shape {list(loss.shape)}")
    return loss.reshape(())
