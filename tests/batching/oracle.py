"""What vmap means: call the function for every sample, and stack."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

# How far two orders of summation in float64 may end up apart, of the terms that they sum up.
TOLERANCE = 1e-12


def loop_and_stack(function: Callable[..., Any], in_dims: Sequence[int | None], *args: Tensor) -> Any:
    """`vmap(function, in_dims)(*args)`. For no samples the shapes are those of one, of zeros, that is dropped."""
    size = next(arg.shape[dim] for arg, dim in zip(args, in_dims, strict=True) if dim is not None)

    def sample(arg: Tensor, dim: int | None, i: int) -> Tensor:
        return arg if dim is None else arg.select(dim, i) if size else arg.sum(dim).to(arg.dtype)

    results = [
        function(*(sample(arg, dim, i) for arg, dim in zip(args, in_dims, strict=True))) for i in range(max(1, size))
    ]
    return pytree.tree_map(lambda *samples: torch.stack(samples)[:size], *results)


def assert_same(got: Any, want: Any, terms: Any = None) -> None:
    """Equal up to the rounding of float64.

    `terms` are sums of the magnitudes of what each element of `want` sums up: it is right to rounding of these, one by
    one. Without them an element is compared on the scale of the greatest, because what cancels is not known.
    """
    scales = pytree.tree_map(_greatest, want) if terms is None else terms
    compared = [pytree.tree_flatten(each) for each in (got, want, scales)]
    assert len({str(structure) for _, structure in compared}) == 1
    for actual, expected, scale in zip(*(leaves for leaves, _ in compared), strict=True):
        assert (actual.shape, actual.dtype) == (expected.shape, expected.dtype)
        distance = (actual - expected).abs()
        allowed = TOLERANCE * scale.expand_as(distance)
        beyond = ~(distance <= allowed)  # what is not a number is beyond everything
        worst = (distance / allowed).max().item() if beyond.any() else 0.0
        assert not beyond.any(), f"{int(beyond.sum())} of {beyond.numel()} are off by up to {worst:.3g} times the limit"


def _greatest(tensor: Tensor) -> Tensor:
    return tensor.abs().max() if tensor.numel() else tensor.new_zeros(())
