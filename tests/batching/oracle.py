"""What vmap means: call the function for every sample, and stack."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree


def loop_and_stack(function: Callable[..., Any], in_dims: Sequence[int | None], *args: Tensor) -> Any:
    """`vmap(function, in_dims)(*args)`, for at least one sample."""
    size = next(arg.shape[dim] for arg, dim in zip(args, in_dims, strict=True) if dim is not None)
    results = [
        function(*(arg if dim is None else arg.select(dim, i) for arg, dim in zip(args, in_dims, strict=True)))
        for i in range(size)
    ]
    return pytree.tree_map(lambda *samples: torch.stack(samples), *results)


def assert_same(got: Any, want: Any) -> None:
    """Equal up to the rounding of float64."""
    torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-10)
