"""Random convolutions, with any of their operands mapped along any dimension."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from hypothesis import strategies as st
from torch import Tensor

from convmesh.geometry import Convolution

Dims = tuple[int | None, ...]


@dataclass(frozen=True)
class Case:
    """`x`, `w`, `b` and `y` are the shapes of one sample: input, weight, bias, output."""

    geometry: Convolution
    x: tuple[int, ...]
    w: tuple[int, ...]
    b: tuple[int, ...] | None
    y: tuple[int, ...]
    batch: int

    def tensor(self, shape: tuple[int, ...], dim: int | None) -> Tensor:
        if dim is None:
            return torch.randn(shape, dtype=torch.float64)
        return torch.randn(*shape[:dim], self.batch, *shape[dim:], dtype=torch.float64)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    dims = draw(st.integers(1, 3))

    def each(low: int, high: int) -> tuple[int, ...]:
        return tuple(draw(st.integers(low, high)) for _ in range(dims))

    groups, c, o = draw(st.sampled_from([1, 1, 2, 3])), draw(st.integers(1, 2)), draw(st.integers(1, 2))
    kernel, stride, dilation, padding = each(1, 3), each(1, 3), each(1, 2), each(0, 2)
    transposed = draw(st.booleans())
    spans = [d * (k - 1) + 1 for d, k in zip(dilation, kernel, strict=True)]
    if transposed:
        extra = tuple(draw(st.integers(0, max(s, d) - 1)) for s, d in zip(stride, dilation, strict=True))
        # Long enough that some of the output is left when the padding is cut off.
        least = [max(1, -(-(2 * p + 1 - span) // s) + 1) for p, span, s in zip(padding, spans, stride, strict=True)]
    else:
        extra = (0,) * dims
        least = [max(1, span - 2 * p) for p, span in zip(padding, spans, strict=True)]
    size = tuple(low + draw(st.integers(0, 3)) for low in least)
    geometry = Convolution(stride, padding, dilation, transposed, extra, groups)
    N = draw(st.sampled_from([0, 1, 1, 2, 3]))
    outputs = groups * o
    return Case(
        geometry,
        (N, groups * c, *size),
        (groups * c, o, *kernel) if transposed else (outputs, c, *kernel),
        (outputs,) if draw(st.booleans()) else None,
        (N, outputs, *geometry.output_size(size, kernel)),
        draw(st.sampled_from([0, 1, 2, 3])),
    )


@st.composite
def mapped_dims(draw: st.DrawFn, *shapes: tuple[int, ...]) -> Dims:
    """A dimension for each shape, and at least one that is not None."""
    dims = tuple(draw(st.none() | st.integers(0, len(shape))) for shape in shapes)
    if any(dim is not None for dim in dims):
        return dims
    which = draw(st.integers(0, len(shapes) - 1))
    return tuple(draw(st.integers(0, len(shape))) if i == which else None for i, shape in enumerate(shapes))
