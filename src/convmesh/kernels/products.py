"""The products of a convolution (output and both gradients), computed by the compiled library."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from math import prod
from typing import NamedTuple

import torch

from ..geometry import Convolution

DIMS = 3  # of space: what has fewer gets others of size 1 in front
WANTED = ("response", "image", "kernel")

_Int = ctypes.c_int64


class Problem(ctypes.Structure):
    """The struct of `reading.h`."""

    _fields_ = [
        *((name, _Int) for name in ("wanted", "samples", "groups", "images", "inputs", "outputs")),
        *((name, _Int * DIMS) for name in ("image", "kernel", "response", "stride", "padding", "dilation")),
        *(("image_steps", _Int * 3), ("kernel_steps", _Int * 2), ("response_steps", _Int * 3), ("bias_step", _Int)),
        *((name, ctypes.c_void_p) for name in ("x", "w", "y", "bias")),
    ]


class Steps(NamedTuple):
    """An image `[B N C *]`, kernel `[B O c *]` and response `[B N O *]`, and an optional bias `[B O]`.

    A tensor that is the same for all samples has stride 0 along B. Space is dense in memory, and so is a kernel's c.
    """

    image: torch.Tensor
    kernel: torch.Tensor
    response: torch.Tensor
    bias: torch.Tensor | None = None


class Product(NamedTuple):
    """What is computed: one of the three (`wanted`), for a number of samples, `by` one of the algorithms."""

    wanted: str
    samples: int
    geometry: Convolution
    by: str = "direct"


class Prepared:
    """A product for tensors with known shapes and strides: only their addresses are missing."""

    def __init__(self, library: ctypes.CDLL, product: Product, tensors: Steps) -> None:
        wanted, samples, geometry, by = product
        image, kernel, response, bias = tensors
        self._problem = bytes(
            Problem(
                *(WANTED.index(wanted), samples, geometry.groups, image.shape[1]),
                *(kernel.shape[2], kernel.shape[1] // geometry.groups),
                *(_filled(tensor.shape[3:], 1) for tensor in (image, kernel, response)),
                *(_filled(geometry.stride, 1), _filled(geometry.padding, 0), _filled(geometry.dilation, 1)),
                *(
                    (_Int * 3)(*image.stride()[:3]),
                    (_Int * 2)(*kernel.stride()[:2]),
                    (_Int * 3)(*response.stride()[:3]),
                ),
                0 if bias is None else bias.stride(0),
            )
        )
        self._function = getattr(library, f"convmesh_{by}_{str(image.dtype).removeprefix('torch.')}")

    def __call__(self, image: int, kernel: int, response: int, bias: int | None, threads: int) -> None:
        """Compute what is wanted from the other two, given their addresses."""
        problem = Problem.from_buffer_copy(self._problem)
        problem.x, problem.w, problem.y, problem.bias = image, kernel, response, bias
        self._function(ctypes.byref(problem), _Int(threads))


def run(library: ctypes.CDLL, product: Product, tensors: Steps, threads: int) -> None:
    """Compute what is wanted from the other two, in place."""
    image, kernel, response, bias = tensors
    addresses = image.data_ptr(), kernel.data_ptr(), response.data_ptr()
    Prepared(library, product, tensors)(*addresses, None if bias is None else bias.data_ptr(), threads)


def _filled(sizes: Sequence[int], fill: int) -> ctypes.Array[ctypes.c_int64]:
    return (_Int * DIMS)(*[fill] * (DIMS - len(sizes)), *sizes)


def agree_with_torch(library: ctypes.CDLL, dtype: torch.dtype) -> bool:
    """Whether the library agrees with torch, on all three products of layers that need most of the code."""
    direct = Convolution((2, 1), (1, 2), (1, 2), False, (0, 0), 2)
    winograd = Convolution((1, 1), (0, 1), (1, 1), False, (0, 0), 2)
    return all(
        _agrees(library, product, images, kernels, dtype)
        for product, images, kernels in (
            (Product("", 2, direct), (2, 2, 10, 9, 11), (2, 36, 5, 3, 2)),
            (Product("", 2, winograd, "winograd"), (2, 2, 34, 9, 36), (2, 36, 17, 3, 3)),
        )
    )


def _agrees(
    library: ctypes.CDLL, product: Product, images: Sequence[int], kernels: Sequence[int], dtype: torch.dtype
) -> bool:
    arguments, aten = product.geometry.arguments, torch.ops.aten
    x, w = (_numbers(shape, dtype) for shape in (images, kernels))
    y = torch.stack([aten.convolution(*sample, None, *arguments) for sample in zip(x, w, strict=True)])
    gradients = [
        aten.convolution_backward(*sample, None, *arguments, (True, True, False))[:2]
        for sample in zip(y, x, w, strict=True)
    ]
    expected = dict(zip(WANTED, (y, *map(torch.stack, zip(*gradients, strict=True))), strict=True))
    for wanted, right in expected.items():
        given = {"image": x, "kernel": w, "response": y, wanted: torch.full_like(right, torch.nan)}
        run(library, product._replace(wanted=wanted), Steps(**given), 2)
        if float((given[wanted] - right).abs().max() / right.abs().max()) > 1e3 * torch.finfo(dtype).eps:
            return False
    return True


def _numbers(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    return torch.arange(prod(shape), dtype=dtype, device="cpu").square_().sin_().view(*shape)
