"""Networks of MONAI, on volumes and images."""

from __future__ import annotations

from copy import deepcopy
from functools import partial
from typing import Any

import torch

from tests.zoo.network import IMAGE, VOLUME, Network, beside

VOLUMES = (1, 1, 16, 16, 24)
THREE: dict[str, Any] = {"spatial_dims": 3, "in_channels": 1, "out_channels": 2}
STEPS: dict[str, Any] = {"channels": (4, 8, 16), "strides": (2, 2)}
ATTENTION: dict[str, Any] = {
    "channels": (8, 8), "num_res_blocks": (1, 1), "attention_levels": (False, True), "norm_num_groups": 4,
}  # fmt: skip
PATCHES: dict[str, Any] = {"hidden_size": 24, "mlp_dim": 32, "num_heads": 2, "spatial_dims": 3}


def make(name: str, **options: Any) -> Any:
    import monai.networks.nets as nets

    return getattr(nets, name)(**deepcopy(options))  # some write into their lists


def dints(**options: Any) -> Any:
    from monai.networks.nets import DiNTS, TopologySearch

    space = TopologySearch(channel_mul=0.25, num_blocks=2, num_depths=2, use_downsample=True, spatial_dims=3)
    return DiNTS(space, 1, 2, use_downsample=True, spatial_dims=3)


def resnet(**options: Any) -> Any:
    from monai.networks.nets import ResNet

    return ResNet("basic", [1, 1, 1, 1], [4, 8, 16, 16], n_input_channels=1, num_classes=2)


def senet(**options: Any) -> Any:
    from monai.networks.blocks.squeeze_and_excitation import SEResNeXtBottleneck
    from monai.networks.nets import SENet

    return SENet(2, 3, SEResNeXtBottleneck, (1, 1, 1, 1), 4, 4, dropout_prob=None, inplanes=16, num_classes=3)


def at_time(model: Any, x: torch.Tensor) -> Any:
    return model(x, timesteps=beside(x, torch.tensor([3])))


def entry(
    name: str, shape: tuple[int, ...] = VOLUMES, call: Any = lambda model, x: model(x), build: Any = None,
    label: str = "", replicated: str = "", **options: Any,
) -> Network:  # fmt: skip
    kind, build = VOLUME if len(shape) == 5 else IMAGE, partial(build or partial(make, name), **options)
    return Network("MONAI", label or name, build, shape, kind, call, replicated=replicated)


FROM_FEW = (
    "a linear layer makes a volume of a few numbers that every rank has, and nothing says along which dimension that "
    "should be sharded"
)


ZOO = [
    entry("UNet", **THREE, **STEPS, num_res_units=1),
    entry("AttentionUnet", **THREE, **STEPS),
    entry("BasicUNet", (1, 1, 32, 32, 48), **THREE, features=(4, 4, 8, 8, 8, 4)),
    entry("BasicUNetPlusPlus", (1, 1, 32, 32, 48), **THREE, features=(4, 4, 8, 8, 8, 4)),
    entry("DynUNet", **THREE, kernel_size=[3, 3, 3], strides=[1, 2, 2], upsample_kernel_size=[2, 2],
          filters=[4, 8, 16], res_block=True),
    entry("SegResNet", **THREE, blocks_down=(1, 1), blocks_up=(1,)),
    entry("SegResNetDS", **THREE, init_filters=8, blocks_down=(1, 1, 1), dsdepth=2),
    entry("SegResNetVAE", input_image_size=(16, 16, 24), vae_nz=8, blocks_down=(1, 1), blocks_up=(1,),
          replicated=FROM_FEW),
    entry("VNet", (1, 1, 32, 32, 16), dropout_prob_down=0.0, dropout_prob_up=(0.0, 0.0)),
    entry("HighResNet", (1, 1, 24, 24, 24), layer_params=(
        {"name": "conv_0", "n_features": 4, "kernel_size": 3},
        {"name": "res_1", "n_features": 4, "kernels": (3, 3), "repeat": 2},
        {"name": "res_2", "n_features": 8, "kernels": (3, 3), "repeat": 1},
        {"name": "conv_1", "n_features": 8, "kernel_size": 1}, {"name": "conv_2", "kernel_size": 1})),
    entry("MedNeXt", (1, 1, 32, 32, 32), init_filters=4, kernel_size=3, blocks_down=(1, 1, 1, 1), blocks_bottleneck=1,
          blocks_up=(1, 1, 1, 1)),
    entry("AHNet", (1, 3, 64, 96), layers=(1, 1, 1, 1), spatial_dims=2, in_channels=3, out_channels=2, psp_block_num=2),
    entry("UNETR", (1, 1, 32, 32, 48), in_channels=1, out_channels=2, img_size=(32, 32, 48), feature_size=4,
          **{**PATCHES, "mlp_dim": 32}),
    entry("SwinUNETR", (1, 1, 64, 32, 32), in_channels=1, out_channels=2, feature_size=12, depths=(2, 1, 1, 1),
          num_heads=(2, 2, 2, 2), window_size=4),
    entry("SwinUNETR", (1, 1, 64, 32, 32), label="SwinUNETR 2", in_channels=1, out_channels=2, feature_size=12,
          depths=(2, 1, 1, 1), num_heads=(2, 2, 2, 2), window_size=4, use_v2=True),
    entry("ViT", in_channels=1, img_size=(16, 16, 24), patch_size=4, num_layers=2, **PATCHES),
    entry("ViTAutoEnc", in_channels=1, img_size=(16, 16, 24), patch_size=4, num_layers=2, deconv_chns=4, **PATCHES),
    entry("FlexibleUNet", (1, 3, 64, 96), in_channels=3, out_channels=2, backbone="resnet18",
          decoder_channels=(16, 8, 8, 4, 4)),
    entry("DenseNet", (1, 1, 32, 32, 24), spatial_dims=3, in_channels=1, out_channels=3, init_features=8, growth_rate=4,
          block_config=(2, 2)),
    entry("EfficientNetBN", (1, 3, 64, 96), model_name="efficientnet-b0", pretrained=False, num_classes=3),
    entry("ResNet", (1, 1, 24, 24, 32), build=resnet),
    entry("SENet", (2, 3, 64, 96), build=senet),
    entry("AutoEncoder", **THREE, channels=(4, 8), strides=(2, 2), inter_channels=(8,)),
    entry("VarAutoEncoder", spatial_dims=3, in_shape=(1, 16, 16, 24), out_channels=1, latent_size=4, channels=(4, 8),
          strides=(2, 2), replicated=FROM_FEW),
    entry("AutoencoderKL", spatial_dims=3, **ATTENTION, latent_channels=4),
    entry("DiffusionModelUNet", call=at_time, spatial_dims=3, in_channels=1, out_channels=1, num_head_channels=4,
          **ATTENTION),
    entry("SPADENet", (1, 3, 32, 32), spatial_dims=2, in_channels=1, out_channels=1, label_nc=3, input_shape=[32, 32],
          channels=[8, 16], z_dim=4, is_vae=False, spade_intermediate_channels=8),
    entry("PatchDiscriminator", (2, 1, 48, 64), spatial_dims=2, channels=8, in_channels=1, num_layers_d=2),
    entry("MultiScalePatchDiscriminator", (2, 1, 48, 64), num_d=2, num_layers_d=2, spatial_dims=2, channels=8,
          in_channels=1, minimum_size_im=32),
    entry("RegUNet", spatial_dims=3, in_channels=1, num_channel_initial=4, depth=2),
    entry("LocalNet", spatial_dims=3, in_channels=1, num_channel_initial=4, extract_levels=(0, 1, 2)),
    entry("VoxelMorphUNet", (1, 2, 16, 16, 24), spatial_dims=3, in_channels=2, unet_out_channels=4,
          channels=(4, 4, 8, 8, 8, 4), final_conv_channels=(4,)),
    entry("HoVerNet", (1, 3, 256, 256), in_channels=3, out_classes=3),
    entry("Quicknat", (1, 1, 32, 48), num_classes=3, num_filters=4),
    entry("Classifier", (2, 1, 32, 48), in_shape=(1, 32, 48), classes=3, channels=(4, 8), strides=(2, 2)),
    entry("Regressor", (2, 1, 32, 48), in_shape=(1, 32, 48), out_shape=(2,), channels=(4, 8), strides=(2, 2)),
    entry("Discriminator", (2, 1, 32, 48), in_shape=(1, 32, 48), channels=(4, 8), strides=(2, 2)),
    entry("DiNTS", (1, 1, 16, 16, 16), build=dints),
]  # fmt: skip
