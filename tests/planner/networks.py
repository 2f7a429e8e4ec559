"""Networks whose plans are compared with real runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from convmesh.models import ConvNeXt, ResNet, UNet, resnet50


def monai_unet(channels: int) -> nn.Module:
    from monai.networks.nets import UNet as MonaiUNet

    sizes = channels, 2 * channels, 4 * channels
    return MonaiUNet(spatial_dims=3, in_channels=1, out_channels=2, channels=sizes, strides=(2, 2))


def segresnet(blocks: int) -> nn.Module:
    from monai.networks.nets import SegResNet

    down = 1, blocks, blocks, 2 * blocks
    return SegResNet(spatial_dims=3, in_channels=1, out_channels=2, init_filters=8, blocks_down=down)


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


@dataclass(frozen=True)
class Network:
    """`of_rank` is an input of a rank for which activations take most of the memory. For quick tests there is a `small`
    input of all ranks, and a `narrow` network with fewer channels and blocks."""

    make: Callable[[], nn.Module]
    of_rank: tuple[int, ...]
    narrow: Callable[[], nn.Module]
    small: tuple[int, ...]


NETWORKS: dict[str, Network] = {
    "unet3d": Network(
        lambda: UNet(3, 1, 2, (16, 32, 64), (2, 2)), (1, 1, 64, 64, 64),
        lambda: UNet(3, 1, 2, (4, 8, 16), (2, 2)), (1, 1, 16, 16, 16),
    ),
    "unet2d": Network(
        lambda: UNet(2, 3, 2, (16, 32, 64, 128), (2, 2, 2)), (1, 3, 512, 512),
        lambda: UNet(2, 3, 2, (4, 8, 16), (2, 2)), (1, 3, 64, 64),
    ),
    "resnet50": Network(
        lambda: resnet50(num_classes=10, width=32), (1, 3, 512, 512),
        lambda: ResNet((1, 2, 1, 1), use_bottleneck=True, num_classes=10, width=8), (1, 3, 64, 64),
    ),
    "convnext": Network(
        lambda: ConvNeXt(dims=(48, 96, 192, 384), num_classes=10), (1, 3, 512, 512),
        lambda: ConvNeXt((1, 1, 3, 1), (8, 16, 32, 64), num_classes=10), (1, 3, 64, 64),
    ),
    "monai_unet": Network(
        lambda: monai_unet(16), (1, 1, 128, 128, 128),
        lambda: monai_unet(4), (1, 1, 32, 32, 32),
    ),
    "segresnet": Network(
        lambda: segresnet(2), (1, 1, 64, 64, 64),
        lambda: segresnet(1), (1, 1, 16, 16, 16),
    ),
    "hugging_face_convnext": Network(
        hugging_face_convnext, (1, 3, 768, 768),
        hugging_face_convnext, (1, 3, 64, 64),
    ),
    "diffusers_vae": Network(
        diffusers_vae, (1, 3, 224, 224),
        diffusers_vae, (1, 3, 32, 32),
    ),
}  # fmt: skip
