"""The products of a convolution by the compiled library: what it is told, and whether it can be trusted."""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Sequence
from functools import cache
from math import prod
from typing import NamedTuple

import torch

from ..geometry import Convolution
from .compiler import load

DIMS = 3  # of space: what has fewer gets others of size 1 in front
DTYPES = ("float32", "float64")
WANTED = ("response", "image", "kernel")

log = logging.getLogger("convmesh.kernels")

_Int = ctypes.c_int64


class Problem(ctypes.Structure):
    """As `reading.h` has it."""

    _fields_ = [
        *((name, _Int) for name in ("wanted", "samples", "groups", "images", "inputs", "outputs")),
        *((name, _Int * DIMS) for name in ("image", "kernel", "response", "stride", "padding", "dilation")),
        *(("image_steps", _Int * 3), ("kernel_steps", _Int * 2), ("response_steps", _Int * 3), ("bias_step", _Int)),
        *((name, ctypes.c_void_p) for name in ("x", "w", "y", "bias")),
    ]


class Steps(NamedTuple):
    """An image [B N C *], kernel [B O c *] and response [B N O *], and a bias [B O] if there is one.

    One sample that stands for all has a step of 0 along B. Space is dense in memory, and so is a kernel's c.
    """

    image: torch.Tensor
    kernel: torch.Tensor
    response: torch.Tensor
    bias: torch.Tensor | None = None


def available() -> bool:
    """Whether there is a library, and it says the same as torch."""
    return _library() is not None


def compute(wanted: str, samples: int, tensors: Steps, geometry: Convolution, threads: int) -> None:
    """Write one of the three, the one that is wanted, from the others."""
    library = _library()
    assert library is not None
    _run(library, wanted, samples, tensors, geometry, threads)


@cache
def _library() -> ctypes.CDLL | None:
    library = load()
    if library is not None and not _agrees_with_torch(library):
        log.warning("no kernels for CPUs: what was compiled gives other results than torch")
        return None
    return library


def _run(library: ctypes.CDLL, wanted: str, samples: int, tensors: Steps, geometry: Convolution, threads: int) -> None:
    image, kernel, response, bias = tensors
    space = image.dim() - 3
    problem = Problem(
        *(WANTED.index(wanted), samples, geometry.groups, image.shape[1]),
        *(kernel.shape[2], kernel.shape[1] // geometry.groups),
        *(_filled(tensor.shape[3:], 1) for tensor in (image, kernel, response)),
        *(_filled(geometry.stride, 1), _filled(geometry.padding, 0), _filled(geometry.dilation, 1)),
        *((_Int * 3)(*image.stride()[:3]), (_Int * 2)(*kernel.stride()[:2]), (_Int * 3)(*response.stride()[:3])),
        0 if bias is None else bias.stride(0),
        *(image.data_ptr(), kernel.data_ptr(), response.data_ptr(), None if bias is None else bias.data_ptr()),
    )
    assert 0 < space <= DIMS
    function = getattr(library, f"convmesh_{str(image.dtype).removeprefix('torch.')}")
    function(ctypes.byref(problem), _Int(threads))


def _filled(sizes: Sequence[int], fill: int) -> ctypes.Array[ctypes.c_int64]:
    return (_Int * DIMS)(*[fill] * (DIMS - len(sizes)), *sizes)


def _agrees_with_torch(library: ctypes.CDLL) -> bool:
    """A compiler's mistakes are not torch's: all three products, once, of a layer that needs most of the code."""
    geometry = Convolution((2, 1), (1, 2), (1, 2), False, (0, 0), 2)
    for dtype in (torch.float32, torch.float64):
        x, w = (_numbers(shape, dtype) for shape in ((2, 2, 10, 9, 11), (2, 36, 5, 3, 2)))
        y = torch.stack(
            [torch.ops.aten.convolution(*sample, None, *geometry.arguments) for sample in zip(x, w, strict=True)]
        )
        gradients = [
            torch.ops.aten.convolution_backward(*sample, None, *geometry.arguments, (True, True, False))
            for sample in zip(y, x, w, strict=True)
        ]
        expected = dict(zip(WANTED, (y, *map(torch.stack, list(zip(*gradients, strict=True))[:2])), strict=True))
        for wanted, right in expected.items():
            given = dict(zip(("image", "kernel", "response"), (x, w, y), strict=True))
            found = given[wanted] = torch.full_like(right, torch.nan)
            _run(library, wanted, 2, Steps(**given), geometry, 2)
            if not torch.allclose(found, right, rtol=1e-3, atol=1e-3 * float(right.abs().max())):
                return False
    return True


def _numbers(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Not random ones, which a user's transforms may have an opinion on."""
    return torch.arange(prod(shape), dtype=dtype).square_().sin_().view(*shape)
