"""Segmentation networks of segmentation_models_pytorch."""

from __future__ import annotations

from functools import partial
from typing import Any

from tests.zoo.network import Network
from tests.zoo.torchvision_names import torchvision_names

NETWORKS = (
    "Unet", "UnetPlusPlus", "MAnet", "Linknet", "FPN", "PSPNet", "PAN", "UPerNet", "DeepLabV3", "DeepLabV3Plus",
    "Segformer",
)  # fmt: skip
SIZES = {"PAN": (128, 128)}  # the least that it takes


def make(name: str, **options: Any) -> Any:
    with torchvision_names():
        import segmentation_models_pytorch as smp
    return getattr(smp, name)("tu-resnet10t", encoder_weights=None, classes=2, **options)


ZOO = [
    Network("segmentation_models_pytorch", name, partial(make, name), (2, 3, *SIZES.get(name, (64, 96))))
    for name in NETWORKS
]
