"""Networks of other people's packages, unmodified, on a mesh: a training step is that of one process."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, distribute_module

import convmesh
from tests.cases import place
from tests.compare import assert_close
from tests.gathers import Sizes
from tests.harness import Pool

pytestmark = pytest.mark.slow  # and `make compat` has no other people's packages


def unet() -> torch.nn.Module:
    from monai.networks.nets import UNet

    made: torch.nn.Module = UNet(
        spatial_dims=3, in_channels=1, out_channels=2, channels=(4, 8, 16), strides=(2, 2), num_res_units=1
    )
    return made


def segresnet() -> torch.nn.Module:
    from monai.networks.nets import SegResNet

    made: torch.nn.Module = SegResNet(spatial_dims=3, init_filters=8, blocks_down=(1, 1), blocks_up=(1,))
    return made


def dynunet() -> torch.nn.Module:
    from monai.networks.nets import DynUNet

    made: torch.nn.Module = DynUNet(
        spatial_dims=3, in_channels=1, out_channels=2, kernel_size=[3, 3, 3], strides=[1, 2, 2],
        upsample_kernel_size=[2, 2], filters=[4, 8, 16], res_block=True,
    )  # fmt: skip
    return made


class Decoder(torch.nn.Module):
    """Decoding is a method of the autoencoder, and `distribute` watches the calls of a module."""

    def __init__(self, autoencoder: Any):
        super().__init__()
        self.autoencoder = autoencoder

    def forward(self, latents: torch.Tensor) -> torch.Tensor:
        image: torch.Tensor = self.autoencoder.decode(latents).sample
        return image


def vae_decoder() -> torch.nn.Module:
    from diffusers import AutoencoderKL

    autoencoder = AutoencoderKL(
        block_out_channels=(8, 16), down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2, layers_per_block=1, norm_num_groups=4,
    )  # fmt: skip
    return Decoder(autoencoder)


def resnet() -> torch.nn.Module:
    from transformers import ResNetConfig, ResNetForImageClassification

    config = ResNetConfig(embedding_size=4, hidden_sizes=[8, 16], depths=[1, 1], layer_type="basic", num_labels=3)
    return ResNetForImageClassification(config)


def convnext() -> torch.nn.Module:
    from transformers import ConvNextConfig, ConvNextForImageClassification

    config = ConvNextConfig(hidden_sizes=[8, 16], depths=[1, 1], num_stages=2, num_labels=3, drop_path_rate=0.0)
    return ConvNextForImageClassification(config)


def cvt() -> torch.nn.Module:
    from transformers import CvtConfig, CvtForImageClassification

    # Two stages; batch norms between tokens and images, whose gradients lie in memory as tokens do.
    config = CvtConfig(
        embed_dim=[8, 16], num_heads=[1, 2], depth=[1, 2], num_stages=2, num_labels=3, cls_token=[False, True],
        patch_sizes=[7, 3], patch_stride=[4, 2], patch_padding=[2, 1], mlp_ratio=[2.0] * 2, drop_path_rate=[0.0] * 2,
        attention_drop_rate=[0.0] * 2, drop_rate=[0.0] * 2, qkv_bias=[True] * 2, kernel_qkv=[3] * 2,
        qkv_projection_method=["dw_bn"] * 2, padding_kv=[1] * 2, stride_kv=[2] * 2, padding_q=[1] * 2, stride_q=[1] * 2,
    )  # fmt: skip
    return CvtForImageClassification(config)


class LambdaNet(torch.nn.Module):
    """A lambda layer between convolutions: queries, keys and values are views of one map, normed and turned."""

    def __init__(self, heads: int = 2, depth: int = 4, width: int = 8) -> None:
        super().__init__()
        self.sizes = heads, depth, width // heads
        self.stem = torch.nn.Sequential(torch.nn.Conv2d(3, width, 3, 2, 1), torch.nn.BatchNorm2d(width))
        self.qkv = torch.nn.Conv2d(width, heads * depth + depth + width // heads, 1, bias=False)
        self.norm_q, self.norm_v = torch.nn.BatchNorm2d(heads * depth), torch.nn.BatchNorm2d(width // heads)
        self.position = torch.nn.Conv3d(1, depth, (3, 3, 1), padding=(1, 1, 0))
        self.head = torch.nn.Linear(width, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads, depth, value = self.sizes
        y = self.stem(x).relu()
        n, _, h, w = y.shape
        q, k, v = torch.split(self.qkv(y), [heads * depth, depth, value], 1)
        q = self.norm_q(q).reshape(n, heads, depth, h * w).transpose(-1, -2)
        v = self.norm_v(v).reshape(n, value, h * w).transpose(-1, -2)
        content = q @ (k.reshape(n, depth, h * w).softmax(-1) @ v).unsqueeze(1)
        near = self.position(v.reshape(n, 1, h, w, value)).reshape(n, depth, h * w, value)
        around = torch.einsum("nhpk,nkpv->nhpv", q, near)
        made: torch.Tensor = self.head((content + around).transpose(-1, -2).reshape(n, -1, h, w).mean((2, 3)))
        return made


# Of the largest tensor of one process, what a rank makes or is sent at once: half with two ranks, and halos.
LARGEST = 0.75
STEP = 0.1  # the learning rate


@dataclass(frozen=True)
class Network:
    build: Callable[[], torch.nn.Module]
    input: tuple[int, ...]
    target: tuple[int, ...]
    classes: int
    plain: bool = False  # put on the mesh by torch's own functions


NETWORKS = {
    "monai UNet": Network(unet, (2, 1, 16, 12, 12), (2, 16, 12, 12), 2),
    "monai SegResNet": Network(segresnet, (2, 1, 12, 16, 8), (2, 12, 16, 8), 2),
    "monai DynUNet": Network(dynunet, (2, 1, 16, 12, 12), (2, 16, 12, 12), 2),
    "diffusers VAE decoder": Network(vae_decoder, (2, 4, 10, 6), (2, 20, 12), 3),
    "transformers ResNet": Network(resnet, (2, 3, 40, 36), (2,), 3, plain=True),
    "transformers ConvNeXt": Network(convnext, (2, 3, 40, 32), (2,), 3),
    "transformers CvT": Network(cvt, (2, 3, 40, 32), (2,), 3),
    "a lambda network": Network(LambdaNet, (2, 3, 24, 24), (2,), 3),
}

# Where the input is cut; the target is cut alike where it has these dimensions, without the channels.
PLACES: list[tuple[tuple[int, ...], dict[str, int]]] = [
    ((2,), {"h": 2}),
    ((2, 2), {"data": 0, "w": 3}),
    ((2, 2), {"h": 2, "w": 3}),
]


def on_mesh(
    network: Network, mesh: DeviceMesh, dims: dict[str, int], model: torch.nn.Module, x: torch.Tensor, y: torch.Tensor
) -> tuple[torch.nn.Module, torch.Tensor, torch.Tensor]:
    whole = {name: dim - 1 if dim else 0 for name, dim in dims.items() if dim == 0 or y.dim() > 1}
    if not network.plain:
        placed = convmesh.shard(x, mesh, **dims), convmesh.shard(y, mesh, **whole)
        # Parameters in messages of their own: of small networks all together are larger than an activation.
        return convmesh.distribute(model, mesh, bucket_bytes=1), *placed
    return (
        distribute_module(model, mesh),
        place(x, mesh, tuple(dims.values())),
        place(y, mesh, tuple(whole.get(name, "R") for name in dims)),
    )


def train(
    network: Network, mesh: DeviceMesh | None, dims: dict[str, int]
) -> tuple[torch.Tensor, torch.Tensor, torch.nn.Module, Sizes]:
    """One step of training; the loss, the input's gradient, the network after it, and the sizes of what was made."""
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what the packages say when they are imported is not our concern
        model = network.build().double().train()
    x = torch.randn(network.input, dtype=torch.float64)
    target = torch.randint(network.classes, network.target)
    if mesh is not None:
        model, x, target = on_mesh(network, mesh, dims, model, x, target)
    x.requires_grad_()
    # The gradient of a bias before a norm is nothing but rounding, of which Adam with a small eps makes whole steps.
    optimizer = torch.optim.AdamW(model.parameters(), lr=STEP, eps=1e-3)
    with Sizes() as sizes:
        y = model(x)
        loss = F.cross_entropy(y if isinstance(y, torch.Tensor) else y.logits, target)
        loss.backward()
        optimizer.step()
    assert x.grad is not None
    return loss.detach(), x.grad, model, sizes


def check(mesh: DeviceMesh, name: str, dims: dict[str, int]) -> None:
    network = NETWORKS[name]
    expected_loss, expected_gradient, expected, one = train(network, None, dims)
    with convmesh.enable():
        loss, gradient, model, many = train(network, mesh, dims)
    assert_close(loss.full_tensor(), expected_loss)
    assert_close(gradient.full_tensor(), expected_gradient)
    for (key, actual), value in zip(model.state_dict().items(), expected.state_dict().values(), strict=True):
        # A step is as large as the learning rate; a bias of keys, which attention ignores, has nothing but rounding.
        scale = max(STEP, value.abs().max().item())
        try:
            assert_close(actual.full_tensor() if isinstance(actual, DTensor) else actual, value, scale)
        except AssertionError as error:
            raise AssertionError(f"{key}: {error}") from None
    found = many.largest / one.largest, many.received_at_once / one.largest
    assert max(found) < LARGEST, f"{found}: {many.maker}"


@pytest.mark.parametrize(("mesh", "dims"), PLACES)
@pytest.mark.parametrize("name", NETWORKS)
def test_a_step_of_training(pool: Pool, name: str, mesh: tuple[int, ...], dims: dict[str, int]) -> None:
    pool.run(check, name, dims, mesh=mesh, names=tuple(dims))
