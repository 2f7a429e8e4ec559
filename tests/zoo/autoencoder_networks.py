"""Autoencoders of diffusers, by their own methods: encode to the mean of the latents, and decode."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from tests.zoo.network import IMAGE, SIGNAL, VIDEO, Layout, Network


def make(name: str, **options: Any) -> Any:
    import diffusers

    return getattr(diffusers, name)(**options)


def encode(model: Any, x: torch.Tensor) -> Any:
    made = model.encode(x)
    return made.latent_dist.mode() if hasattr(made, "latent_dist") else made


def decode(model: Any, z: torch.Tensor) -> Any:
    return model.decode(z)


def decode_frames(model: Any, z: torch.Tensor) -> Any:
    """Images that are frames of one video."""
    return model.decode(z, num_frames=z.shape[0])


def decode_codes(model: Any, z: torch.Tensor) -> Any:
    return model.decode(z, force_not_quantize=True)


TWO = {"block_out_channels": (8, 16), "layers_per_block": 1, "norm_num_groups": 4}
BLOCKS_2D = {"down_block_types": ("DownEncoderBlock2D",) * 2, "up_block_types": ("UpDecoderBlock2D",) * 2}
WAN = {"base_dim": 8, "z_dim": 4, "dim_mult": [1, 2, 2], "num_res_blocks": 1, "temperal_downsample": [True, True],
       "latents_mean": [0.0] * 4, "latents_std": [1.0] * 4}  # fmt: skip
FOUR: dict[str, Any] = {"block_out_channels": (8, 8, 8, 8), "layers_per_block": 1, "norm_num_groups": 4}

# What a picture or a video is, and what latents are.
IMAGES, LATENTS = (1, 3, 32, 48), (1, 4, 12, 20)
FRAMES, LATENT_FRAMES = (1, 3, 9, 32, 32), (1, 4, 3, 8, 12)

Entry = tuple[str, str, dict[str, Any], tuple[int, ...], tuple[int, ...], tuple[Layout, ...], Callable[..., Any]]
ENTRIES: list[Entry] = [
    ("AutoencoderKL", "AutoencoderKL", {**TWO, **BLOCKS_2D}, IMAGES, LATENTS, IMAGE, decode),
    ("AsymmetricAutoencoderKL", "AsymmetricAutoencoderKL", {
        **BLOCKS_2D, "down_block_out_channels": (8, 16), "up_block_out_channels": (8, 16), "norm_num_groups": 4,
    }, IMAGES, LATENTS, IMAGE, decode),
    ("VQModel", "VQModel", {**TWO, **BLOCKS_2D, "latent_channels": 4}, IMAGES, LATENTS, IMAGE, decode_codes),
    ("AutoencoderTiny", "AutoencoderTiny", {
        "encoder_block_out_channels": (8, 8), "decoder_block_out_channels": (8, 8), "num_encoder_blocks": (1, 1),
        "num_decoder_blocks": (1, 1),
    }, IMAGES, LATENTS, IMAGE, decode),
    ("AutoencoderDC", "AutoencoderDC", {
        "latent_channels": 4, "attention_head_dim": 8, "encoder_block_out_channels": (8, 16),
        "decoder_block_out_channels": (8, 16), "encoder_layers_per_block": (1, 1), "decoder_layers_per_block": (1, 1),
        "encoder_block_types": ("ResBlock", "EfficientViTBlock"),
        "decoder_block_types": ("ResBlock", "EfficientViTBlock"), "encoder_qkv_multiscales": ((), (5,)),
        "decoder_qkv_multiscales": ((), (5,)),
    }, IMAGES, LATENTS, IMAGE, decode),
    ("AutoencoderKLTemporalDecoder", "AutoencoderKLTemporalDecoder", {
        "block_out_channels": (32, 32), "down_block_types": ("DownEncoderBlock2D",) * 2,
    }, (3, 3, 32, 48), (6, 4, 12, 20), (((2, 2), (2, 3)), ((3,), (0,))), decode_frames),
    ("AutoencoderKLWan 2.1", "AutoencoderKLWan", WAN, FRAMES, LATENT_FRAMES, VIDEO, decode),
    ("AutoencoderKLWan 2.2", "AutoencoderKLWan", {
        **WAN, "is_residual": True, "patch_size": 2, "in_channels": 12, "out_channels": 12, "decoder_base_dim": 8,
    }, FRAMES, LATENT_FRAMES, VIDEO, decode),
    ("AutoencoderKLQwenImage", "AutoencoderKLQwenImage", WAN, (1, 3, 5, 32, 32), (1, 4, 2, 8, 12), VIDEO, decode),
    ("AutoencoderKLHunyuanVideo", "AutoencoderKLHunyuanVideo", {**FOUR, "latent_channels": 4},
     FRAMES, LATENT_FRAMES, VIDEO, decode),
    ("AutoencoderKLCogVideoX", "AutoencoderKLCogVideoX", {**FOUR, "latent_channels": 4, "sample_height": 32,
     "sample_width": 32}, FRAMES, LATENT_FRAMES, VIDEO, decode),
    ("AutoencoderKLLTXVideo", "AutoencoderKLLTXVideo", {
        "latent_channels": 8, "block_out_channels": (8, 8, 8, 8), "decoder_block_out_channels": (8, 8, 8, 8),
        "layers_per_block": (1, 1, 1, 1, 1), "decoder_layers_per_block": (1, 1, 1, 1, 1), "patch_size": 1,
    }, FRAMES, (1, 8, 4, 6, 8), VIDEO, decode),
    ("AutoencoderKLMochi", "AutoencoderKLMochi", {
        "latent_channels": 4, "encoder_block_out_channels": (32,) * 4, "decoder_block_out_channels": (32,) * 4,
        "layers_per_block": (1, 1, 1, 1, 1), "latents_mean": (0.0,) * 4, "latents_std": (1.0,) * 4,
    }, (1, 3, 13, 32, 32), (1, 4, 3, 6, 8), VIDEO, decode),
    ("AutoencoderKLCosmos", "AutoencoderKLCosmos", {
        "latent_channels": 4, "encoder_block_out_channels": (8, 16), "decode_block_out_channels": (8, 16),
        "num_layers": 1, "patch_size": 2, "attention_resolutions": (8,), "resolution": 32,
        "spatial_compression_ratio": 4, "temporal_compression_ratio": 4,
    }, FRAMES, LATENT_FRAMES, VIDEO, decode),
    ("AutoencoderKLMagvit", "AutoencoderKLMagvit", {**FOUR, "latent_channels": 4}, FRAMES, LATENT_FRAMES, VIDEO,
     decode),
    ("AutoencoderOobleck", "AutoencoderOobleck", {
        "encoder_hidden_size": 8, "downsampling_ratios": [2, 4], "channel_multiples": [1, 2], "decoder_channels": 8,
        "decoder_input_channels": 4,
    }, (2, 2, 256), (2, 4, 40), SIGNAL, decode),
]  # fmt: skip

# Variances of norms, and attention; and what is made larger, nearest, in decoders.
SINGLE = {("AutoencoderDC", "encode"), ("AutoencoderDC", "decode"), ("AutoencoderKLWan", "decode"),
          ("AutoencoderKLQwenImage", "decode"), ("AutoencoderKLLTXVideo", "encode"),
          ("AutoencoderKLLTXVideo", "decode")}  # fmt: skip

ZOO = [
    Network(
        "diffusers", f"{name}: {what}", partial(make, kind, **options), shape, layouts, call,
        single=(kind, what) in SINGLE,
    )
    for name, kind, options, pictures, latents, layouts, decoder in ENTRIES
    for what, shape, call in (("encode", pictures, encode), ("decode", latents, decoder))
]  # fmt: skip
# Its methods take tiles of a fixed size only.
ALLEGRO = partial(make, "AutoencoderKLAllegro", **FOUR, sample_size=32)
ZOO += [
    Network("diffusers", "AutoencoderKLAllegro: encoder", ALLEGRO, (1, 3, 8, 32, 32), VIDEO, lambda m, x: m.encoder(x)),
    Network("diffusers", "AutoencoderKLAllegro: decoder", ALLEGRO, (1, 4, 2, 4, 6), VIDEO, lambda m, z: m.decoder(z)),
]
