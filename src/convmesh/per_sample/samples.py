"""Single samples of a batch: checking that they are independent, and calling a function with each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.func import vmap
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_map_only, tree_unflatten

from .batch_layout import BatchLayout, without_partial


def check_independent(model: nn.Module) -> None:
    """Refuse layers that make one sample's output depend on the others."""
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


def tensors_of(batch: Any) -> tuple[Tensor, ...]:
    return tuple(each for each in tree_leaves(batch) if isinstance(each, Tensor))


def batch_size(batch: tuple[Any, ...]) -> int:
    tensors = tensors_of(batch)
    if not tensors:
        raise ValueError("`batch` is empty: give the input of the model, and what the loss takes beside the output")
    sizes = [tensor.shape[0] if tensor.ndim else None for tensor in tensors]
    if len(set(sizes)) > 1 or sizes[0] is None:
        raise ValueError(f"the tensors of the batch must agree in their first size, but have {sizes}")
    return sizes[0]


def parameters_of(model: nn.Module) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return the trainable parameters, and all other parameters and buffers of the model."""
    parameters = dict(model.named_parameters())
    trainable = {name: value.detach() for name, value in parameters.items() if value.requires_grad}
    if not trainable:
        raise ValueError("the model has no trainable parameter")
    fixed = {name: value.detach() for name, value in parameters.items() if name not in trainable}
    return trainable, {**fixed, **dict(model.named_buffers())}


class UnmappableError(RuntimeError):
    """torch has no vmap for an operation: typically in a loss that creates zeros and writes targets into them."""


def map_with_vmap(function: Callable[..., Any], *batch: Any, **options: Any) -> Any:
    """Return `vmap(function)(*batch)`, mapped over all tensors in `batch`."""
    one, tensors = _over_tensors(function, batch)
    try:
        return vmap(one, **options)(*tensors)
    except RuntimeError as error:
        # A loop would draw different random numbers for each sample: only allowed if asked for.
        what, randomness = str(error), options.get("randomness")
        unmappable = any(words in what for words in ("vmap", "have storage", "Batching rule not implemented"))
        if "random" in what or randomness == "same" or not unmappable:
            raise
        raise UnmappableError(what) from error


def map_with_loop(function: Callable[..., Any], *batch: Any) -> Any:
    """Return the same as `map_with_vmap`, by a loop."""
    one, tensors = _over_tensors(function, batch)
    samples = [one(*sample) for sample in zip(*(each.unbind() for each in tensors), strict=True)]
    return tree_map(lambda *each: torch.stack(each), *samples)


def _over_tensors(function: Callable[..., Any], batch: tuple[Any, ...]) -> tuple[Callable[..., Any], list[Tensor]]:
    """Return `function` as a function of the tensors in `batch` only, and these tensors."""
    leaves, tree = tree_flatten(batch)
    at = [index for index, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]

    def of_tensors(*tensors: Tensor) -> Any:
        own = dict(zip(at, tensors, strict=True))
        return function(*tree_unflatten([own.get(index, leaf) for index, leaf in enumerate(leaves)], tree))

    return of_tensors, [leaves[index] for index in at]


def losses_of(loss_fn: Callable[..., Tensor], output: Any, *others: Any) -> Tensor:
    """Return the losses [B] of the samples, each computed as a batch of one."""

    def one(*sample: Any) -> Tensor:
        return single_number(loss_fn(*tree_map_only(Tensor, lambda each: each.unsqueeze(0), sample)))

    beside = tensors_of(others)
    output = tree_map_only(DTensor, lambda each: without_partial(each, beside), output)
    layout = BatchLayout.of(tensors_of((output, others)))
    is_local = layout is not None and layout.samples_are_local
    batch = local_parts((output, *others)) if is_local else (output, *others)
    try:
        losses: Tensor = map_with_vmap(one, *batch) if batch_size(batch) else tensors_of(batch)[0].reshape(0, 1).sum(1)
    except UnmappableError:
        losses = map_with_loop(one, *batch)
    if layout is None or not is_local:
        return losses
    return DTensor.from_local(
        losses, layout.mesh, layout.placements, run_check=False, shape=torch.Size([layout.batch]), stride=(1,)
    )


def local_parts(batch: tuple[Any, ...]) -> tuple[Any, ...]:
    local: tuple[Any, ...] = tree_map_only(DTensor, lambda each: each.to_local(), batch)
    return local


def single_number(loss: Tensor) -> Tensor:
    if loss.numel() != 1:
        raise ValueError(f"the loss of one sample must be one number, but has the shape {list(loss.shape)}")
    return loss.reshape(())
