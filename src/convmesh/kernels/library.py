"""The compiled library, which is compiled and tested when it is first needed."""

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
    """Whether there is a library whose results agree with torch's."""
    return _library() is not None


def takes(tensor: torch.Tensor) -> bool:
    """Whether the library can read a tensor's memory: not if it is a subclass, or a lazy negative (`x.conj().imag`)."""
    plain = type(tensor) is torch.Tensor and tensor.is_cpu and tensor.dtype in DTYPES
    return plain and not is_lazy(tensor) and available()


def lanes(itemsize: int) -> int:
    """Return how many numbers of `itemsize` bytes one vector of the library holds."""
    return int(existing().convmesh_vector_bytes()) // itemsize


def compute(product: products.Product, tensors: products.Steps, threads: int) -> None:
    """Compute one of image, kernel and response, the one that `product` wants, from the other two, in place."""
    products.run(existing(), product, tensors, threads)


def prepare(product: products.Product, tensors: products.Steps) -> products.Prepared:
    """Prepare `compute` for tensors with the strides of these."""
    return products.Prepared(existing(), product, tensors)


def moments(x: torch.Tensor, sets: int, samples: int = 1) -> torch.Tensor:
    """Return mean and variance of each of `sets` sets, `[1 2 set]`; in each sample, the sets follow one another."""
    return norms.moments(existing(), x, sets, torch.get_num_threads(), samples)


def sums(gradient: torch.Tensor, x: torch.Tensor, moments: norms.Pair, samples: int = 1) -> torch.Tensor:
    """Return, for each set, the sum of the gradient times the normalised input, and of the gradient."""
    return norms.sums(existing(), gradient, x, moments, torch.get_num_threads(), samples)


def combined(x: torch.Tensor, gradient: torch.Tensor | None, linear: norms.Linear, sets: int) -> torch.Tensor:
    """Return a linear function of each of `sets` equal parts of contiguous memory, as a new tensor."""
    return norms.combined(existing(), x, gradient, linear, sets, torch.get_num_threads())


def existing() -> ctypes.CDLL:
    """Return the library; call this only if it is `available`."""
    library = _library()
    assert library is not None
    return library


@cache
def _library() -> ctypes.CDLL | None:
    return load(_agrees_with_torch)


def _agrees_with_torch(library: ctypes.CDLL) -> bool:
    """Test a newly compiled library against torch: compilers have bugs, too."""
    checks = (products.agree_with_torch, norms.agree_with_torch)
    # In a new thread, where the user's autocast, transforms and modes are not active.
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(lambda: all(agree(library, dtype) for agree in checks for dtype in DTYPES)).result()
