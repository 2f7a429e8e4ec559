"""Well-known networks in plain PyTorch: nothing in them depends on ranks or on convmesh."""

from .convnext import ConvNeXt as ConvNeXt
from .convnext import convnext_small as convnext_small
from .convnext import convnext_tiny as convnext_tiny
from .resnet import ResNet as ResNet
from .resnet import resnet18 as resnet18
from .resnet import resnet50 as resnet50
from .unet import UNet as UNet
