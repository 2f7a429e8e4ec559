"""Classifiers of timm, with as few channels as they take."""

from __future__ import annotations

from functools import partial
from typing import Any

from tests.zoo.network import Network
from tests.zoo.torchvision_names import torchvision_names


def make(name: str, **options: Any) -> Any:
    with torchvision_names():
        import timm
    return timm.create_model(name, num_classes=3, **options)


# Transformers want to know the size of an image. Blocks are left out so that each kind of block is there once or twice.
TWO: dict[str, Any] = {"depth": 2, "embed_dim": 24, "num_heads": 2}
WINDOWS: dict[str, Any] = {
    "img_size": 64, "window_size": 4, "embed_dim": 12, "depths": (2, 2), "num_heads": (2, 4),
}  # fmt: skip
NETWORKS: dict[str, tuple[int, dict[str, Any]]] = {
    "resnet10t": (64, {}),
    "resnetv2_18": (64, {}),
    "seresnet18": (64, {}),
    "ecaresnet26t": (64, {"layers": (1, 1, 1, 1)}),
    "skresnet18": (64, {}),
    "resnext26ts": (64, {}),
    "resnest14d": (64, {}),
    "res2net50_26w_4s": (64, {"layers": (1, 1, 1, 1)}),
    "lambda_resnet26rpt_256": (256, {}),
    "halonet26t": (256, {}),  # its blocks are of 8 x 8 at a stride of 32
    "botnet26t_256": (256, {}),
    "convnext_atto": (64, {"depths": (1, 1, 1, 1), "dims": (16, 24, 32, 48)}),
    "convnextv2_atto": (64, {"depths": (1, 1, 1, 1), "dims": (16, 24, 32, 48)}),
    "efficientnet_b0": (64, {}),
    "efficientnetv2_rw_t": (64, {}),
    "mobilenetv2_050": (64, {}),
    "mobilenetv3_small_050": (64, {}),
    "mobilenetv4_conv_small_035": (64, {}),
    "mnasnet_small": (64, {}),
    "tinynet_e": (64, {}),
    "lcnet_035": (64, {}),
    "ghostnet_050": (64, {}),
    "regnetx_002": (64, {}),
    "regnety_002": (64, {}),
    "densenet121": (64, {"growth_rate": 8, "block_config": (2, 2, 2, 2)}),
    "dla34": (64, {}),
    "dpn48b": (64, {}),
    "hrnet_w18_small": (64, {}),
    "vgg11_bn": (64, {"mlp_ratio": 0.01}),
    "xception41": (64, {}),
    "inception_v3": (128, {}),
    "cspresnet50": (64, {}),
    "darknet17": (64, {}),
    "ese_vovnet19b_slim_dw": (64, {}),
    "repvgg_a0": (64, {}),
    "mobileone_s0": (64, {}),
    "rexnetr_100": (64, {}),
    "selecsls42": (64, {}),
    "nf_resnet26": (64, {}),
    "nfnet_f0": (64, {"depths": (1, 1, 1, 1), "channels": (64, 64, 128, 128), "group_size": 16}),
    "vit_tiny_patch16_224": (64, {"img_size": 64, "patch_size": 4, **TWO}),
    "vit_relpos_small_patch16_224": (64, {"img_size": 64, "patch_size": 4, **TWO}),
    "deit_tiny_patch16_224": (64, {"img_size": 64, "patch_size": 4, **TWO}),
    "beit_base_patch16_224": (64, {"img_size": 64, "patch_size": 4, **TWO}),
    "eva02_tiny_patch14_224": (64, {"img_size": 64, "patch_size": 4, **TWO}),
    "cait_xxs24_224": (64, {"img_size": 64, "patch_size": 4, **TWO}),
    "xcit_nano_12_p16_224": (64, {"depth": 2, "embed_dim": 24, "num_heads": 2}),
    "mixer_s32_224": (128, {"img_size": 128}),
    "resmlp_12_224": (64, {"img_size": 64}),
    "swin_tiny_patch4_window7_224": (64, WINDOWS),
    "swinv2_tiny_window8_256": (128, {**WINDOWS, "img_size": 128}),  # its tables of positions are of 7 x 7 x 512
    "twins_pcpvt_small": (64, {"img_size": 64, "embed_dims": (16, 32, 48, 64), "num_heads": (1, 2, 2, 2),
                               "depths": (1, 1, 1, 1)}),
    "pvt_v2_b0": (64, {"depths": (1, 1, 1, 1)}),
    "poolformer_s12": (64, {}),
    "caformer_s18": (64, {}),
    "edgenext_xx_small": (64, {}),
    "mobilevit_xxs": (64, {}),
    "mobilevitv2_050": (64, {}),
    "efficientvit_b0": (64, {}),
    "efficientformerv2_s0": (224, {}),
    "fastvit_t8": (64, {}),
    "repvit_m0_9": (64, {}),
    "coatnet_nano_rw_224": (64, {"img_size": 64}),
    "maxvit_rmlp_pico_rw_256": (64, {"img_size": 64}),
    "focalnet_tiny_srf": (64, {}),
    "davit_tiny": (64, {"depths": (1, 1, 1, 1), "embed_dims": (16, 32, 48, 64), "num_heads": (1, 2, 2, 2)}),
    "gcvit_xxtiny": (64, {"img_size": 64, "window_size": (4, 4, 4, 2), "embed_dim": 16}),
    "visformer_tiny": (64, {"img_size": 64}),
    "levit_128s": (128, {"img_size": 128, "embed_dim": (16, 24, 32), "key_dim": 8, "num_heads": (2, 2, 2),
                         "depth": (1, 1, 1)}),
    "nest_tiny_jx": (64, {"img_size": 64}),
    "mambaout_femto": (64, {"depths": (1, 1, 1, 1), "dims": (16, 24, 32, 48)}),
    "hiera_tiny_224": (64, {"img_size": (64, 64), "embed_dim": 16, "stages": (1, 1, 2, 1)}),
    "starnet_s050": (64, {}),
    "hgnetv2_b0": (64, {}),
    "inception_next_atto": (64, {}),
}  # fmt: skip

REPLICATED = {
    "lambda_resnet26rpt_256": "over three ranks the pairs of positions, of which gradients are made, are a list that "
    "does not fall into three parts",
    "nf_resnet26": "weights, which are larger than its activations here, are standardised in pieces that this page "
    "does not know from activations",
}

ZOO = [
    Network("timm", name, partial(make, name, **options), (2, 3, size, size), replicated=REPLICATED.get(name, ""))
    for name, (size, options) in NETWORKS.items()
]
