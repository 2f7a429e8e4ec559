"""Loading the picture, and embedding pictures in the page."""

from __future__ import annotations

import base64
import io
from typing import Any

import torch

from .settings import DemoError, Settings


def load(settings: Settings) -> torch.Tensor:
    """Return the picture as `[1 3 H W]`, from 0 to 1. It is part of the scikit-image package: nothing is downloaded."""
    try:
        from skimage import data
    except ImportError as error:
        raise DemoError("the demo's picture comes with scikit-image: pip install 'convmesh[demo]'") from error
    picture = torch.from_numpy(getattr(data, settings.picture)()[..., :3].copy())
    if settings.crop is not None:
        starts = [max(0, (size - settings.crop) // 2) for size in picture.shape[:2]]
        picture = picture[starts[0] :, starts[1] :][: settings.crop, : settings.crop]
    return picture.movedim(-1, 0)[None].float().div(255).contiguous()


def to_bytes(picture: torch.Tensor) -> torch.Tensor:
    """`[1 3 H W]` of floats -> `[H W 3]` of bytes."""
    return picture[0].clamp(0, 1).mul(255).round().to(torch.uint8).movedim(0, -1).contiguous().cpu()


def embedded(picture: torch.Tensor, lossless: bool = False) -> str:
    """Return a data URL of an `[H W 3]` picture."""
    from PIL import Image

    kind, options = ("png", {"optimize": True}) if lossless else ("jpeg", {"quality": 84})
    file = io.BytesIO()
    image: Any = Image.fromarray(picture.numpy())
    image.save(file, format=kind, **options)
    return f"data:image/{kind};base64,{base64.b64encode(file.getvalue()).decode()}"


def psnr(picture: torch.Tensor, target: torch.Tensor) -> float:
    """Return the peak signal-to-noise ratio of two `[H W 3]` pictures, in decibels."""
    error = (picture.double() - target.double()).div(255).square().mean()
    return float(-10 * error.log10())
