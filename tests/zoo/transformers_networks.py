"""Vision models of transformers, with random numbers in small configurations."""

from __future__ import annotations

from functools import partial
from typing import Any

from tests.zoo.network import IMAGE, SIGNAL, Layout, Network


def make(model: str, config: str, **options: Any) -> Any:
    import transformers

    return getattr(transformers, model)(getattr(transformers, config)(**options))


VIT: dict[str, Any] = {
    "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32, "image_size": 64,
    "patch_size": 4, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0,
}  # fmt: skip
LABELS: dict[str, Any] = {"num_labels": 3}
SWIN: dict[str, Any] = {
    "embed_dim": 24, "depths": [2, 2], "num_heads": [2, 4], "window_size": 4, "image_size": 64, "drop_path_rate": 0.0,
}  # fmt: skip
IMAGES = (2, 3, 64, 64)  # of one sample torch's own gradients of batch norms can be wrong, on one device


def entry(name: str, config: str, shape: tuple[int, ...] = IMAGES, layouts: tuple[Layout, ...] = IMAGE,
          call: Any = lambda model, x: model(x), **options: Any) -> Network:  # fmt: skip
    return Network("transformers", name, partial(make, name, config, **options), shape, layouts, call)


ZOO = [
    entry("ResNetForImageClassification", "ResNetConfig", embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1],
          layer_type="basic", **LABELS),
    entry("RegNetForImageClassification", "RegNetConfig", embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1],
          groups_width=4, **LABELS),
    entry("ConvNextForImageClassification", "ConvNextConfig", hidden_sizes=[8, 16], depths=[1, 1], num_stages=2,
          **LABELS),
    entry("ConvNextV2ForImageClassification", "ConvNextV2Config", hidden_sizes=[8, 16], depths=[1, 1], num_stages=2,
          **LABELS),
    entry("CvtForImageClassification", "CvtConfig", embed_dim=[8, 16], num_heads=[1, 2], depth=[1, 2], num_stages=2,
          cls_token=[False, True], patch_sizes=[7, 3], patch_stride=[4, 2], patch_padding=[2, 1], mlp_ratio=[2.0] * 2,
          drop_path_rate=[0.0] * 2, attention_drop_rate=[0.0] * 2, drop_rate=[0.0] * 2, qkv_bias=[True] * 2,
          kernel_qkv=[3] * 2, qkv_projection_method=["dw_bn"] * 2, padding_kv=[1] * 2, stride_kv=[2] * 2,
          padding_q=[1] * 2, stride_q=[1] * 2, **LABELS),
    entry("MobileNetV1ForImageClassification", "MobileNetV1Config", depth_multiplier=0.25, image_size=64,
          classifier_dropout_prob=0.0, **LABELS),
    entry("MobileNetV2ForImageClassification", "MobileNetV2Config", depth_multiplier=0.35, image_size=64,
          classifier_dropout_prob=0.0, **LABELS),
    entry("MobileViTForImageClassification", "MobileViTConfig", image_size=64, hidden_sizes=[24, 24, 24],
          neck_hidden_sizes=[8, 8, 8, 16, 16, 16, 24], **LABELS),
    entry("MobileViTV2ForImageClassification", "MobileViTV2Config", image_size=64, width_multiplier=0.25, **LABELS),
    entry("EfficientNetForImageClassification", "EfficientNetConfig", width_coefficient=0.25, depth_coefficient=0.25,
          hidden_dim=320, **LABELS),
    entry("BitForImageClassification", "BitConfig", embedding_size=32, hidden_sizes=[128, 128], depths=[1, 1],
          **LABELS),
    entry("PoolFormerForImageClassification", "PoolFormerConfig", hidden_sizes=[8, 16, 24, 32], depths=[1, 1, 1, 1],
          **LABELS),
    entry("PvtForImageClassification", "PvtConfig", image_size=64, hidden_sizes=[8, 16, 24, 32],
          depths=[1, 1, 1, 1], num_attention_heads=[1, 2, 2, 2], **LABELS),
    entry("PvtV2ForImageClassification", "PvtV2Config", image_size=64, hidden_sizes=[8, 16, 24, 32],
          depths=[1, 1, 1, 1], num_attention_heads=[1, 2, 2, 2], **LABELS),
    entry("SegformerForSemanticSegmentation", "SegformerConfig", hidden_sizes=[8, 16, 24, 32], depths=[1, 1, 1, 1],
          num_attention_heads=[1, 2, 2, 2], decoder_hidden_size=16, classifier_dropout_prob=0.0,
          hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, **LABELS),
    entry("GLPNForDepthEstimation", "GLPNConfig", hidden_sizes=[8, 16, 24, 32], depths=[1, 1, 1, 1],
          num_attention_heads=[1, 2, 2, 2], decoder_hidden_size=8),
    entry("SwinForImageClassification", "SwinConfig", **SWIN, **LABELS),
    entry("Swinv2ForImageClassification", "Swinv2Config", **SWIN, **LABELS),
    entry("Swin2SRForImageSuperResolution", "Swin2SRConfig", (1, 3, 32, 32), embed_dim=12, depths=[2], num_heads=[2],
          window_size=4, image_size=32, upscale=2),
    entry("FocalNetForImageClassification", "FocalNetConfig", image_size=64, embed_dim=12, depths=[1, 1, 1, 1],
          **LABELS),
    entry("ViTForImageClassification", "ViTConfig", **VIT, **LABELS),
    entry("DeiTForImageClassification", "DeiTConfig", **VIT, **LABELS),
    entry("BeitForImageClassification", "BeitConfig", **VIT, **LABELS),
    entry("Dinov2ForImageClassification", "Dinov2Config", **{**VIT, "mlp_ratio": 2}, **LABELS),
    entry("VitDetModel", "VitDetConfig", hidden_size=24, num_hidden_layers=2, num_attention_heads=2, image_size=64,
          pretrain_image_size=64, patch_size=4, window_size=4, window_block_indices=[0],
          use_relative_position_embeddings=True),
    entry("SamVisionModel", "SamVisionConfig", hidden_size=24, output_channels=8, num_hidden_layers=2,
          num_attention_heads=2, image_size=64, patch_size=4, window_size=4, global_attn_indexes=[1], mlp_dim=32),
    entry("HieraForImageClassification", "HieraConfig", embed_dim=8, image_size=[64, 64], depths=[1, 1, 2, 1],
          num_heads=[1, 2, 2, 2], **LABELS),
    entry("LevitForImageClassification", "LevitConfig", image_size=64, hidden_sizes=[16, 24, 32], key_dim=[8] * 3,
          num_attention_heads=[2, 2, 2], depths=[1, 1, 1], **LABELS),
    entry("DPTForDepthEstimation", "DPTConfig", **{**VIT, "num_hidden_layers": 4}, backbone_out_indices=[0, 1, 2, 3],
          neck_hidden_sizes=[8, 8, 8, 8], fusion_hidden_size=24, reassemble_factors=[4, 2, 1, 0.5], is_hybrid=False),
    entry("UperNetForSemanticSegmentation", "UperNetConfig", backbone_config={
              "model_type": "resnet", "embedding_size": 8, "hidden_sizes": [8, 8, 16, 16], "depths": [1, 1, 1, 1],
              "layer_type": "basic", "out_features": ["stage1", "stage2", "stage3", "stage4"],
          }, hidden_size=16, auxiliary_in_channels=16, **LABELS),
    entry("SuperPointForKeypointDetection", "SuperPointConfig", call=lambda model, x: model.encoder(x[:, :1]),
          encoder_hidden_sizes=[8, 8, 8, 8], decoder_hidden_size=8),
    entry("EncodecModel", "EncodecConfig", (2, 1, 640), SIGNAL, num_filters=4, hidden_size=16, codebook_size=8,
          upsampling_ratios=[4, 2], call=lambda model, x: model.decoder(model.encoder(x))),
    entry("DacModel", "DacConfig", (2, 1, 512), SIGNAL, encoder_hidden_size=8, downsampling_ratios=[2, 4],
          decoder_hidden_size=32, n_codebooks=2, codebook_size=8, codebook_dim=4,
          call=lambda model, x: model.decoder(model.encoder(x))),
    entry("TextNetForImageClassification", "TextNetConfig", hidden_sizes=[8] * 5, stem_out_channels=8, **LABELS),
    entry("YolosModel", "YolosConfig", **{**VIT, "image_size": [64, 64]}, num_detection_tokens=4),
]  # fmt: skip
