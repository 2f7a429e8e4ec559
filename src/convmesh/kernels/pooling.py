"""Max pooling and flat positions on one rank."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from .. import _torch
from .backend import Kernel

Pair = tuple[torch.Tensor, torch.Tensor]

# Channels that fill a vector register, and samples that take longer than the calls for them.
CHANNELS, ELEMENTS = 8, 2**14


@Kernel
def max_pool(x: torch.Tensor, operator: _torch.Operator, kernel: Sequence[int], *window: Any) -> Pair:
    """Return values and indices of `operator(x, kernel, *window)`."""
    values, indices = operator(x, kernel, *window)
    return values, indices


def _turning_pays(x: torch.Tensor, operator: _torch.Operator, kernel: Sequence[int], *window: Any) -> bool:
    if x.dim() != len(kernel) + 2 or not x.is_floating_point() or not x.is_contiguous() or _torch.tracing():
        return False
    return x.shape[0] > 0 and x.shape[1] >= CHANNELS and x[0].numel() >= ELEMENTS


@max_pool.on("cpu", when=_turning_pays)
def _by_channels_last(x: torch.Tensor, operator: _torch.Operator, kernel: Sequence[int], *window: Any) -> Pair:
    """Use torch's kernel for channels_last. It is 20 times as fast as the contiguous one, 3 times with the copies."""
    # A sample at a time, so that what is turned needs no more memory than that.
    results: Pair | None = None
    for number, sample in enumerate(x):
        pair = operator(_channels_last(sample), kernel, *window)
        results = results or _room(x, pair[0].shape[1:])
        for result, part in zip(results, pair, strict=True):
            result[number].flatten(1).copy_(part[0].movedim(0, -1).flatten(0, -2).t())
    assert results is not None
    return results


def _channels_last(sample: torch.Tensor) -> torch.Tensor:
    """`[C space] -> [1 C space]` in channels_last, copied as a transposed matrix, which is fast in torch."""
    return sample.flatten(1).t().contiguous().view(1, *sample.shape[1:], -1).movedim(-1, 1)


def _room(x: torch.Tensor, shape: Sequence[int]) -> Pair:
    full = (x.shape[0], *shape)
    return x.new_empty(full), x.new_empty(full, dtype=torch.int64)


@Kernel
def quotient(flat: torch.Tensor, by: int) -> torch.Tensor:
    """Divide positions, which are not negative, and round down."""
    return flat.div(by, rounding_mode="trunc")


@quotient.on("cpu", when=lambda flat, by: True)
def _by_float64(flat: torch.Tensor, by: int) -> torch.Tensor:
    """Divide in float64: on CPUs that is much faster than with integers, and positions are small enough to be exact."""
    return flat.double().div_(by).long()
