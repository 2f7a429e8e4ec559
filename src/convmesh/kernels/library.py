"""The compiled library: made and tried when first asked for, and used where there is one."""

from __future__ import annotations

import ctypes
from concurrent.futures import ThreadPoolExecutor
from functools import cache

import torch

from .._torch import is_lazy
from . import norms, products
from .cached import load

DTYPES = (torch.float32, torch.float64)


def available() -> bool:
    """Whether there is a library, and it says the same as torch."""
    return _library() is not None


def takes(tensor: torch.Tensor) -> bool:
    """Whether the library can work on its memory: that of a subclass may be elsewhere, or not be there yet, and that of
    `x.conj().imag` holds the negative."""
    plain = type(tensor) is torch.Tensor and tensor.is_cpu and tensor.dtype in DTYPES
    return plain and not is_lazy(tensor) and available()


def lanes(itemsize: int) -> int:
    """How many numbers of so many bytes the library takes at a time."""
    return int(existing().convmesh_vector_bytes()) // itemsize


def compute(product: products.Product, tensors: products.Steps, threads: int) -> None:
    """Write one of an image, a kernel and a response, the one that is wanted, from the others."""
    products.run(existing(), product, tensors, threads)


def prepare(product: products.Product, tensors: products.Steps) -> products.Prepared:
    """The same for tensors that lie as these do."""
    return products.Prepared(existing(), product, tensors)


def moments(x: torch.Tensor, sets: int, samples: int = 1) -> torch.Tensor:
    """Mean and variance of each of `sets` sets, [1 2 set]. Every sample has a part of each, one behind the other
    in contiguous memory, and none is empty."""
    return norms.moments(existing(), x, sets, torch.get_num_threads(), samples)


def sums(gradient: torch.Tensor, x: torch.Tensor, moments: norms.Pair, samples: int = 1) -> torch.Tensor:
    """Of the gradient times the normalised input, and of the gradient, in as many such sets as there are moments."""
    return norms.sums(existing(), gradient, x, moments, torch.get_num_threads(), samples)


def combined(x: torch.Tensor, gradient: torch.Tensor | None, linear: norms.Linear, sets: int) -> torch.Tensor:
    """A linear function of each of `sets` equal parts of contiguous memory, in new memory."""
    return norms.combined(existing(), x, gradient, linear, sets, torch.get_num_threads())


def existing() -> ctypes.CDLL:
    """The library, where it is available."""
    library = _library()
    assert library is not None
    return library


@cache
def _library() -> ctypes.CDLL | None:
    return load(_agrees_with_torch)


def _agrees_with_torch(library: ctypes.CDLL) -> bool:
    """A compiler's mistakes are not torch's."""
    checks = (products.agree_with_torch, norms.agree_with_torch)
    # In a thread of its own, which nothing reaches that a user may have set: autocasting, transforms, modes.
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(lambda: all(agree(library, dtype) for agree in checks for dtype in DTYPES)).result()
