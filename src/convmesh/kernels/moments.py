"""Mean and variance by the compiled library."""

from __future__ import annotations

import ctypes

import torch

_Int = ctypes.c_int64


def run(library: ctypes.CDLL, x: torch.Tensor, sets: int, threads: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Of each of `sets` equal parts of contiguous memory, none of which is empty."""
    mean, variance = x.new_empty(sets), x.new_empty(sets)
    function = getattr(library, f"convmesh_moments_{str(x.dtype).removeprefix('torch.')}")
    pointers = [ctypes.c_void_p(each.data_ptr()) for each in (x, mean, variance)]
    function(pointers[0], _Int(sets), _Int(x.numel() // sets), *pointers[1:], _Int(threads))
    return mean, variance


def agrees_with_torch(library: ctypes.CDLL, dtype: torch.dtype) -> bool:
    """On sets that are cut into pieces, and far from zero."""
    x = 100 + torch.arange(3 * 9001, dtype=dtype, device="cpu").square_().sin_().view(3, 9001)
    variance, mean = torch.var_mean(x.double(), 1, correction=0)
    found = run(library, x, 3, 2)
    close = (
        torch.allclose(each.double(), right, rtol=1e-4) for each, right in zip(found, (mean, variance), strict=True)
    )
    return all(close)
