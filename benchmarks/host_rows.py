"""The operators and networks whose host time is measured, and their tensors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from convmesh.models import ConvNeXt, UNet, resnet50


@dataclass(frozen=True)
class Row:
    """Something to call: `make(x)` of the tensor that it works on, forward and, if it `learns`, backward."""

    name: str
    make: Callable[[Tensors], Callable[[Tensor], Tensor]]
    shape: tuple[int, ...] = (4, 8, 8, 8)  # of the local tensor
    stock: int | None = 2  # the dimension that is sharded for stock DTensor; None where plain PyTorch is the measure
    limit: float = 1.0
    learns: bool = True


@dataclass(frozen=True)
class Tensors:
    """Makes the tensors of a row: on one device, or on a mesh with dimension `dim` sharded."""

    mesh: DeviceMesh | None
    dim: int = 0

    def sharded(self, shape: tuple[int, ...], dim: int | None = None) -> Tensor:
        at = self.dim if dim is None else dim
        return self._placed(torch.randn(shape), Shard(at), at)

    def replicated(self, *shape: int) -> Tensor:
        return self._placed(torch.randn(shape), Replicate())

    def labels(self, classes: int, shape: tuple[int, ...]) -> Tensor:
        """Sharded as what they are the labels of, which has channels; replicated where they are labels of samples."""
        labels, at = torch.randint(classes, shape), max(0, self.dim - 1)
        return self._placed(labels, Shard(at), at) if len(shape) > at else self._placed(labels, Replicate())

    def module(self, module: nn.Module) -> nn.Module:
        """With its parameters and buffers replicated."""
        for child in module.modules():
            for name, parameter in child.named_parameters(recurse=False):
                child.register_parameter(name, nn.Parameter(self._placed(parameter.data, Replicate())))
            for name, buffer in child.named_buffers(recurse=False):
                child.register_buffer(name, self._placed(buffer, Replicate()))
        return module

    def _placed(self, local: Tensor, placement: Any, dim: int | None = None) -> Tensor:
        if self.mesh is None:
            return local
        sizes = list(local.shape)
        if dim is not None:
            sizes[dim] *= self.mesh.size()
        stride = torch.empty(sizes, device="meta").stride()
        return DTensor.from_local(
            local, self.mesh, [placement], run_check=False, shape=torch.Size(sizes), stride=stride
        )


def _convolution(tensors: Tensors) -> Callable[[Tensor], Tensor]:
    weight = tensors.replicated(8, 8, 3, 3).requires_grad_()
    return lambda x: F.conv2d(x, weight, padding=1)


def _linear(tensors: Tensors) -> Callable[[Tensor], Tensor]:
    layer = tensors.module(nn.Linear(8, 8))
    return lambda x: layer(x)


def _cross_entropy(tensors: Tensors) -> Callable[[Tensor], Tensor]:
    labels = tensors.labels(8, (4, 8, 8))
    return lambda x: F.cross_entropy(x, labels)


def _add(tensors: Tensors) -> Callable[[Tensor], Tensor]:
    other = tensors.sharded((4, 8, 8, 8))
    return lambda x: x + other


def _cat(tensors: Tensors) -> Callable[[Tensor], Tensor]:
    other = tensors.sharded((4, 8, 8, 8))
    return lambda x: torch.cat([x, other], 1)


def _optimizer(tensors: Tensors, **options: bool) -> Callable[[Tensor], Tensor]:
    parameters = [tensors.replicated(8, 8, 3, 3).requires_grad_() for _ in range(16)]
    for parameter in parameters:
        parameter.grad = tensors.replicated(8, 8, 3, 3)
    optimizer = torch.optim.AdamW(parameters, lr=1e-4, **options)
    for _ in range(257):  # what ranks have is compared in steps whose number is a power of two
        optimizer.step()

    def step(x: Tensor) -> Tensor:
        optimizer.step()
        return x

    return step


ROWS = (
    Row("convolution 3x3", _convolution, stock=0, limit=2),
    Row("batch norm", lambda tensors: tensors.module(nn.BatchNorm2d(8))),
    Row("max pool 3 s2", lambda tensors: lambda x: F.max_pool2d(x, 3, 2, 1)),
    Row("linear", _linear),
    Row("cross entropy", _cross_entropy),
    Row("cat", _cat),
    Row("interpolate", lambda tensors: partial(F.interpolate, scale_factor=2, mode="bilinear"), stock=None, limit=3),
    Row("relu", lambda tensors: torch.relu),
    Row("add", _add),
    Row("AdamW, fused", partial(_optimizer, fused=True), learns=False),
    Row("AdamW, foreach", partial(_optimizer, foreach=True), learns=False),
)  # fmt: skip


@dataclass(frozen=True)
class Network:
    name: str
    build: Callable[[], nn.Module]
    shape: tuple[int, ...]
    dense: bool
    stock: bool = False  # whether stock DTensor trains it, sharded over the batch


# Narrow ones, of which a kernel takes no time.
NETWORKS = (
    Network("ResNet-50", lambda: resnet50(num_classes=4, width=8), (1, 3, 64, 64), False),
    Network("U-Net 3-d", lambda: UNet(3, 1, 2, (8, 8, 8), (2, 2)), (1, 1, 16, 8, 8), True, stock=True),
)
# Steps of these are compiled: the four networks of the training benchmarks, narrow, of which a compiler takes no less.
COMPILED = (
    Network("ConvNeXt-T", lambda: ConvNeXt((3, 3, 9, 3), (8, 8, 8, 8), num_classes=4), (1, 3, 128, 64), False),
    Network("ResNet-50", lambda: resnet50(num_classes=4, width=8), (2, 3, 64, 64), False),
    Network("U-Net 2-d", lambda: UNet(2, 3, 2, (8, 8, 8, 8), (2, 2, 2)), (1, 3, 64, 64), True),
    Network("U-Net 3-d", lambda: UNet(3, 1, 2, (8, 8, 8), (2, 2)), (1, 1, 32, 8, 8), True),
)
STEP_LIMIT, OPERATOR_LIMIT, VIEW_LIMIT = 4.0, 1.5, 3.0
