"""Networks whose plans are compared with real runs."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from convmesh.models import UNet, convnext_tiny, resnet50


def monai_unet() -> nn.Module:
    from monai.networks.nets import UNet as MonaiUNet

    return MonaiUNet(spatial_dims=3, in_channels=1, out_channels=2, channels=(16, 32, 64), strides=(2, 2))


def segresnet() -> nn.Module:
    from monai.networks.nets import SegResNet

    return SegResNet(spatial_dims=3, in_channels=1, out_channels=2, init_filters=8)


def hugging_face_convnext() -> nn.Module:
    from transformers import ConvNextConfig, ConvNextForImageClassification

    sizes = ConvNextConfig(depths=[1, 1, 2, 1], hidden_sizes=[16, 32, 64, 128], num_labels=5)
    return _First(ConvNextForImageClassification(sizes), "pixel_values")


def diffusers_vae() -> nn.Module:
    from diffusers import AutoencoderKL

    down, up = ("DownEncoderBlock2D",) * 2, ("UpDecoderBlock2D",) * 2
    model = AutoencoderKL(block_out_channels=(16, 32), down_block_types=down, up_block_types=up, norm_num_groups=8)
    return _First(model, "sample")


class _First(nn.Module):
    def __init__(self, model: nn.Module, name: str):
        super().__init__()
        self.model, self.name = model, name

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return next(iter(self.model(**{self.name: x}).values()))


# Each with an input for quick tests, and one for which activations take most of the memory, on each rank.
NETWORKS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], tuple[int, ...]]] = {
    "unet3d": (lambda: UNet(3, 1, 2, (8, 16, 32), (2, 2)), (1, 1, 32, 32, 32), (1, 1, 96, 96, 96)),
    "unet2d": (lambda: UNet(2, 3, 2, (8, 16, 32), (2, 2)), (1, 3, 128, 128), (1, 3, 768, 768)),
    "resnet50": (lambda: resnet50(num_classes=10), (1, 3, 128, 128), (1, 3, 384, 384)),
    "convnext": (lambda: convnext_tiny(num_classes=10, stochastic_depth=0.0), (1, 3, 128, 128), (1, 3, 384, 384)),
    "monai_unet": (monai_unet, (1, 1, 48, 48, 48), (1, 1, 160, 160, 160)),
    "segresnet": (segresnet, (1, 1, 32, 32, 32), (1, 1, 96, 96, 96)),
    "hugging_face_convnext": (hugging_face_convnext, (1, 3, 256, 256), (1, 3, 1024, 1024)),
    "diffusers_vae": (diffusers_vae, (1, 3, 64, 64), (1, 3, 256, 256)),
}
