"""Ghost clipping for convolutional networks: norm samplers for Opacus, also for sharded samples.

Importing this module registers them, as importing Opacus registers its own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from ..sharding.errors import ShardingError
from .layer_norms import squared_norms
from .samples import losses_of

try:
    from opacus.grad_sample import GradSampleHooksFastGradientClipping, register_norm_sampler
    from opacus.grad_sample.grad_sample_module_fast_gradient_clipping_tp import GradSampleHooksFastGradientClippingTP
    from opacus.optimizers import optimizer_fast_gradient_clipping
except ImportError as error:
    raise ImportError("convmesh.opacus needs Opacus\n  remedy: pip install convmesh[opacus]") from error

LAYERS: list[type[nn.Module]] = [
    *(nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d),
    *(nn.GroupNorm, nn.LayerNorm, nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d, nn.Linear, nn.Embedding),
]


def norms_of_layer(
    layer: nn.Module, activations: list[Tensor | tuple[Tensor]], backprops: Tensor
) -> dict[nn.Parameter, Tensor]:
    """Return the norms [B] of the per-sample gradients of each trainable parameter of the layer."""
    activation = activations[0][0] if isinstance(activations[0], tuple) else activations[0]
    named = layer.named_parameters(recurse=False)
    return {
        each: squared_norms(layer, name, activation, backprops).sqrt() for name, each in named if each.requires_grad
    }


class PerSampleLoss(nn.Module):
    """A loss that returns one value per sample with `reduction="none"`, as Opacus' ghost clipping needs.

    Opacus calls a criterion with `reduction="none"`, and takes the result for one value per sample. Segmentation losses
    return one value per pixel then, and a Dice loss over a batch depends on all its samples.

    Args:
        loss_fn: `loss_fn(output, *others)`. It is called with single samples, each as a batch of one, and must return
            one number.
        reduction: "mean" or "sum" over the samples, the same as `make_private(loss_reduction=...)`.

    Examples:
        >>> from convmesh.opacus import PerSampleLoss
        >>> criterion = PerSampleLoss(nn.CrossEntropyLoss(), reduction="none")
        >>> tuple(criterion(torch.randn(4, 3, 8, 8), torch.randint(3, (4, 8, 8))).shape)
        (4,)
    """

    def __init__(self, loss_fn: Callable[..., Tensor], reduction: str = "mean") -> None:
        super().__init__()
        self.loss_fn = loss_fn
        self.reduction = reduction

    def forward(self, output: Any, *others: Any) -> Tensor:
        losses = losses_of(self.loss_fn, output, *others)
        return losses if self.reduction == "none" else losses.mean() if self.reduction == "mean" else losses.sum()


_rearranged = GradSampleHooksFastGradientClipping.rearrange_grad_samples
_noise = optimizer_fast_gradient_clipping._generate_noise


def _rearranged_sharded(self: Any, *, module: nn.Module, **arguments: Any) -> tuple[list[Any], Tensor]:
    activations, backprops = _rearranged(self, module=module, **arguments)
    tensor_parallel = isinstance(self, GradSampleHooksFastGradientClippingTP)  # it sums norms of local tensors
    if tensor_parallel or not any(isinstance(each, DTensor) for each in (*activations, backprops)):
        return activations, backprops
    if type(module) not in LAYERS or not self.use_ghost_clipping:
        raise ShardingError(
            f"ghost clipping: Opacus would give {type(module).__name__} gradients of a rank's own part of the samples\n"
            "  remedy: make_private(grad_sample_mode='ghost') and torch's own layers, or convmesh.clipped_gradient"
        )
    # Opacus' hook would take the local tensor if it recognised a DTensor.
    return [(each,) for each in activations], backprops


def _noise_for_sharded(std: float, reference: Tensor, **arguments: Any) -> Tensor:
    """Use the first rank's noise on all ranks, so that parameters stay equal."""
    noise: Tensor = _noise(std, reference, **arguments)
    if not isinstance(reference, DTensor):
        return noise
    return distribute_tensor(noise, reference.device_mesh, reference.placements)


register_norm_sampler(LAYERS)(norms_of_layer)
GradSampleHooksFastGradientClipping.rearrange_grad_samples = _rearranged_sharded
optimizer_fast_gradient_clipping._generate_noise = _noise_for_sharded
