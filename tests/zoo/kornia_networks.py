"""Filters, features and losses of kornia, and its networks."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from tests.zoo.network import Network


class Function(torch.nn.Module):
    """A function without parameters."""

    def __init__(self, find: Callable[[], Callable[..., Any]]) -> None:
        super().__init__()
        self.find = find

    def forward(self, x: torch.Tensor) -> Any:
        return self.find()(x)


def filters(name: str, *args: Any) -> Callable[..., Any]:
    import kornia.filters

    return lambda x: getattr(kornia.filters, name)(x, *args)


def features(name: str, **options: Any) -> Any:
    import kornia.feature

    return getattr(kornia.feature, name)(**options)


def morphology(name: str) -> Callable[..., Any]:
    import kornia.morphology

    return lambda x: getattr(kornia.morphology, name)(x, torch.ones(3, 3, dtype=x.dtype))


FILTERS: dict[str, tuple[Any, ...]] = {
    "gaussian_blur2d": ((5, 5), (1.5, 1.5)), "sobel": (), "laplacian": (3,), "median_blur": ((3, 3),),
    "bilateral_blur": ((3, 3), 0.1, (1.5, 1.5)), "unsharp_mask": ((3, 3), (1.5, 1.5)), "spatial_gradient": (),
    "box_blur": ((3, 5),), "canny": (),
}  # fmt: skip
FEATURES: dict[str, dict[str, Any]] = {"CornerHarris": {"k": 0.04}, "BlobHessian": {}, "KeyNet": {"pretrained": False}}

ZOO = [
    *(Network("kornia", name, partial(Function, partial(filters, name, *args)), (1, 3, 24, 32), positive=True)
      for name, args in FILTERS.items()),
    *(Network("kornia", name, partial(Function, partial(morphology, name)), (1, 3, 24, 32), positive=True)
      for name in ("dilation", "erosion", "opening")),
    *(Network("kornia", name, partial(features, name, **options), (1, 1, 24, 32), positive=True)
      for name, options in FEATURES.items()),
    Network("kornia", "DISK", partial(features, "DISK"), (1, 3, 32, 48), positive=True,
            call=lambda model, x: model.heatmap_and_dense_descriptors(x)),
]  # fmt: skip
