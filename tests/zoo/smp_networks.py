"""Segmentation networks of segmentation_models_pytorch."""

from __future__ import annotations

from functools import partial
from typing import Any

from tests.zoo.network import Network
from tests.zoo.torchvision_names import torchvision_names

NETWORKS: dict[str, dict[str, Any]] = {
    "Unet": {}, "UnetPlusPlus": {}, "MAnet": {}, "Linknet": {}, "FPN": {}, "PSPNet": {}, "PAN": {}, "UPerNet": {},
    "DeepLabV3": {}, "DeepLabV3Plus": {}, "Segformer": {},
}  # fmt: skip


def make(name: str, **options: Any) -> Any:
    with torchvision_names():
        import segmentation_models_pytorch as smp
    return getattr(smp, name)("tu-resnet10t", encoder_weights=None, classes=2, **options)


ZOO = [
    Network("segmentation_models_pytorch", name, partial(make, name, **options), (2, 3, 64, 96))
    for name, options in NETWORKS.items()
]
