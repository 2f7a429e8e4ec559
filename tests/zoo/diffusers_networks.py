"""Networks that remove noise: U-Nets and transformers of diffusers, with times and texts that are replicated."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from tests.zoo.autoencoder_networks import make
from tests.zoo.network import IMAGE, SIGNAL, TOKENS, VIDEO, Network, beside

TIME = torch.tensor([7])
BLOCKS: dict[str, Any] = {"block_out_channels": (8, 16), "layers_per_block": 1, "norm_num_groups": 4}
CROSS: dict[str, Any] = {
    **BLOCKS, "cross_attention_dim": 8, "attention_head_dim": 4,
    "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
}  # fmt: skip


def numbers(*shape: int) -> torch.Tensor:
    return torch.linspace(-1, 1, torch.Size(shape).numel(), dtype=torch.float64).sin().view(shape)


def at_time(model: Any, x: torch.Tensor, **more: Any) -> Any:
    return model(x, **beside(x, {"timestep": TIME.expand(x.shape[0]), **more}))


def with_text(model: Any, x: torch.Tensor, **more: Any) -> Any:
    return at_time(model, x, encoder_hidden_states=numbers(x.shape[0], 5, 8), **more)


def with_mask(model: Any, x: torch.Tensor, **more: Any) -> Any:
    return with_text(model, x, encoder_attention_mask=torch.ones(x.shape[0], 5, dtype=torch.long), **more)


HEADS: dict[str, Any] = {"num_attention_heads": 2, "attention_head_dim": 12, "num_layers": 1}
VIDEOS = (1, 4, 4, 12, 16)
ZOO = [
    Network("diffusers", "UNet2DModel", partial(make, "UNet2DModel", **BLOCKS, down_block_types=(
        "DownBlock2D", "AttnDownBlock2D"), up_block_types=("AttnUpBlock2D", "UpBlock2D"), attention_head_dim=4),
        (1, 3, 24, 32), IMAGE, at_time),
    Network("diffusers", "UNet2DConditionModel", partial(make, "UNet2DConditionModel", **CROSS,
            up_block_types=("UpBlock2D", "CrossAttnUpBlock2D")), (1, 4, 24, 32), IMAGE, with_text),
    Network("diffusers", "ControlNetModel", partial(make, "ControlNetModel", **CROSS,
            conditioning_embedding_out_channels=(8, 8)), (1, 4, 24, 32), IMAGE,
            lambda model, x: with_text(model, x, controlnet_cond=numbers(1, 3, 48, 64))),
    Network("diffusers", "UNet1DModel", partial(make, "UNet1DModel", block_out_channels=(32, 32, 64), sample_size=1024,
            in_channels=2, extra_in_channels=64), (2, 2, 1024), SIGNAL, at_time),
    Network("diffusers", "UNet3DConditionModel", partial(make, "UNet3DConditionModel", **BLOCKS, cross_attention_dim=8,
            attention_head_dim=4, down_block_types=("CrossAttnDownBlock3D", "DownBlock3D"),
            up_block_types=("UpBlock3D", "CrossAttnUpBlock3D")), (1, 4, 4, 12, 16), VIDEO, with_text),
    Network("diffusers", "Transformer2DModel", partial(make, "Transformer2DModel", num_attention_heads=2,
            attention_head_dim=4, in_channels=8, norm_num_groups=4), (1, 8, 16, 20), IMAGE, lambda model, x: model(x)),
    Network("diffusers", "DiTTransformer2DModel", partial(make, "DiTTransformer2DModel", **HEADS, sample_size=24,
            norm_num_groups=4), (1, 4, 24, 24), IMAGE,
            lambda model, x: at_time(model, x, class_labels=torch.tensor([3]))),
    Network("diffusers", "SD3Transformer2DModel", partial(make, "SD3Transformer2DModel", sample_size=24, in_channels=4,
            out_channels=4, num_layers=2, attention_head_dim=12, num_attention_heads=2, joint_attention_dim=8,
            caption_projection_dim=24, pooled_projection_dim=8, pos_embed_max_size=16), (1, 4, 20, 24), IMAGE,
            lambda model, x: with_text(model, x, pooled_projections=numbers(1, 8))),
    Network("diffusers", "PixArtTransformer2DModel", partial(make, "PixArtTransformer2DModel", **HEADS,
            cross_attention_dim=24, sample_size=24, caption_channels=8, norm_num_groups=4,
            use_additional_conditions=False), (1, 4, 24, 24), IMAGE,
            lambda model, x: with_text(model, x, added_cond_kwargs={
                "resolution": None, "aspect_ratio": None})),
    Network("diffusers", "SanaTransformer2DModel", partial(make, "SanaTransformer2DModel", in_channels=4,
            out_channels=4, num_layers=1, num_attention_heads=2, attention_head_dim=12, num_cross_attention_heads=2,
            cross_attention_head_dim=12, cross_attention_dim=24, caption_channels=8, sample_size=24), (1, 4, 24, 24),
            IMAGE, with_text, single=True),  # its attention
    Network("diffusers", "WanTransformer3DModel", partial(make, "WanTransformer3DModel", num_attention_heads=2,
            attention_head_dim=12, in_channels=4, out_channels=4, text_dim=8, freq_dim=16, ffn_dim=96, num_layers=2,
            rope_max_seq_len=32), VIDEOS, VIDEO, with_text, single=True),  # its norms
    Network("diffusers", "CogVideoXTransformer3DModel", partial(make, "CogVideoXTransformer3DModel",
            num_attention_heads=2, attention_head_dim=16, num_layers=1,
            in_channels=4, out_channels=4, time_embed_dim=16, text_embed_dim=8, sample_width=16, sample_height=12,
            sample_frames=13, max_text_seq_length=5), (1, 4, 4, 12, 16), (((2, 2), (3, 4)), ((2,), (1,))), with_text),
    Network("diffusers", "HunyuanVideoTransformer3DModel", partial(make, "HunyuanVideoTransformer3DModel",
            in_channels=4, out_channels=4, num_attention_heads=2, attention_head_dim=12, num_layers=1,
            num_single_layers=1,
            num_refiner_layers=1, guidance_embeds=False, text_embed_dim=8, pooled_projection_dim=8,
            rope_axes_dim=(4, 4, 4)), VIDEOS, VIDEO,
            lambda model, x: with_mask(model, x, pooled_projections=numbers(1, 8))),
    Network("diffusers", "MochiTransformer3DModel", partial(make, "MochiTransformer3DModel",
            **{**HEADS, "num_layers": 2}, pooled_projection_dim=8, in_channels=4, text_embed_dim=8,
            time_embed_dim=16, max_sequence_length=5), VIDEOS, VIDEO, with_mask, single=True),  # its norms
    Network("diffusers", "LTXVideoTransformer3DModel", partial(make, "LTXVideoTransformer3DModel", **HEADS,
            in_channels=8, out_channels=8, cross_attention_dim=24, caption_channels=8), (2, 64, 8), TOKENS,
            lambda model, x: with_mask(model, x, num_frames=4, height=4, width=4)),
    Network("diffusers", "CogView4Transformer2DModel", partial(make, "CogView4Transformer2DModel", in_channels=4,
            out_channels=4, num_layers=1, attention_head_dim=12, num_attention_heads=2, text_embed_dim=8,
            time_embed_dim=16, condition_dim=4, pos_embed_max_size=16, sample_size=24, rope_axes_dim=(6, 6)),
            (1, 4, 20, 24), IMAGE, lambda model, x: with_text(model, x, original_size=torch.tensor([[20, 24]]),
            target_size=torch.tensor([[20, 24]]), crop_coords=torch.tensor([[0, 0]]))),
    Network("diffusers", "Lumina2Transformer2DModel", partial(make, "Lumina2Transformer2DModel", sample_size=24,
            in_channels=4, hidden_size=24, num_layers=1, num_refiner_layers=1, num_attention_heads=2, num_kv_heads=1,
            multiple_of=8, axes_dim_rope=(4, 4, 4), axes_lens=(32, 32, 32), cap_feat_dim=8), (1, 4, 20, 24), IMAGE,
            with_mask, single=True),
    Network("diffusers", "FluxTransformer2DModel", partial(make, "FluxTransformer2DModel", in_channels=4, num_layers=1,
            num_single_layers=1, attention_head_dim=12, num_attention_heads=2, joint_attention_dim=8,
            pooled_projection_dim=8, axes_dims_rope=(4, 4, 4)), (1, 64, 4), (((4,), (1,)), ((3,), (1,))),
            lambda model, x: with_text(model, x, pooled_projections=numbers(1, 8), img_ids=numbers(64, 3),
            txt_ids=numbers(5, 3))),
]  # fmt: skip
