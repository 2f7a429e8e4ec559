"""Dense strides, memory formats, and local tensors with the strides of one device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache, wraps
from typing import Any, TypeVar, cast

import torch

Stride = tuple[int, ...]

AnyFunction = TypeVar("AnyFunction", bound=Callable[..., Any])


def _kept(find: AnyFunction) -> AnyFunction:
    """Cache a function, except for symbolic sizes of a compiler, which are not hashable."""
    cache = lru_cache(maxsize=4096)(find)

    @wraps(find)
    def look_up(*key: Any) -> Any:
        try:
            return cache(*key)
        except TypeError:
            return find(*key)

    return cast(AnyFunction, look_up)


_CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}


@_kept
def dense_stride(shape: tuple[int, ...], memory_format: torch.memory_format) -> Stride:
    """Return the strides of a new tensor of this shape."""
    order = list(range(len(shape)))
    if memory_format in (torch.channels_last, torch.channels_last_3d):
        order = [0, *range(2, len(shape)), 1]
    strides, step = [0] * len(shape), 1
    for dim in reversed(order):
        strides[dim] = step
        step *= max(1, shape[dim])
    return tuple(strides)


def same_stride(shape: tuple[int, ...], one: Stride, other: Stride) -> bool:
    """Whether two strides mean the same layout: the stride of a dimension of size 1 does not matter."""
    return all(a == b for a, b, size in zip(one, other, shape, strict=True) if size > 1)


@_kept
def format_of(shape: tuple[int, ...], stride: Stride) -> torch.memory_format | None:
    """Return contiguous_format or channels_last if the strides match it, else None; contiguous_format if both do."""
    for memory_format in (torch.contiguous_format, _CHANNELS_LAST.get(len(shape))):
        if memory_format is not None and same_stride(shape, stride, dense_stride(shape, memory_format)):
            return memory_format
    return None


def memory_format(tensor: torch.Tensor) -> torch.memory_format:
    """Return channels_last if the strides match it and it differs from contiguous, else contiguous."""
    for rank, candidate in ((4, torch.channels_last), (5, torch.channels_last_3d)):
        if tensor.dim() == rank and tensor.stride(1) == 1 and not tensor.is_contiguous() and tensor.shape[1] > 1:
            return candidate
    return torch.contiguous_format


def usual(local: torch.Tensor, whole: Stride) -> torch.Tensor:
    """Return a local tensor with strides that one device could have had, by a view; `whole` are the global strides.

    The stride of a dimension of size 1 does not matter, and a local tensor may have any there, such as that of a larger
    tensor that it is a view of. Kernels guess the memory format from all strides, and some get it wrong.
    """
    shape = local.shape
    if (1 not in shape and 0 not in shape) or len(shape) != len(whole):
        return local  # the usual case; or the rank is outside of the mesh
    stride = _usual_stride(shape, local.stride(), whole)
    return local if stride is None else local.as_strided(shape, stride)


class Usual:
    """`usual` of tensors of one shape, one after the other, which nearly always have the same strides."""

    __slots__ = ("_fine", "_whole")

    def __init__(self, whole: Stride):
        self._whole = whole
        self._fine: Stride | None = None

    def __call__(self, local: torch.Tensor) -> torch.Tensor:
        if local.stride() == self._fine:
            return local
        made = usual(local, self._whole)
        if made is local:
            self._fine = local.stride()
        return made


def is_usual(shape: tuple[int, ...], stride: Stride, whole: Stride) -> bool:
    """Whether a local tensor of this shape already has the strides that `usual` would give it."""
    sane = (1 not in shape and 0 not in shape) or len(shape) != len(whole)
    return sane or _usual_stride(shape, stride, whole) is None


@_kept
def _usual_stride(shape: tuple[int, ...], stride: Stride, whole: Stride) -> Stride | None:
    """Return the strides that one device could have had, or None if they are `stride`.

    They are those of a memory format if the tensor has one; else each dimension of size 1 gets the extent of the
    dimensions inside of it.
    """
    found = format_of(shape, stride)
    if found is not None:
        last = _CHANNELS_LAST.get(len(shape))
        if last is not None and whole[1] < whole[-1] and same_stride(shape, stride, dense_stride(shape, last)):
            found = last  # one channel, or one pixel, has both formats: take that of the full tensor
        wanted = dense_stride(shape, found)
    else:
        steps, reach = list(stride), 1
        for dim in sorted(range(len(shape)), key=lambda dim: (whole[dim], -dim)):
            if shape[dim] <= 1:
                steps[dim] = reach
            else:
                reach = max(reach, stride[dim] * shape[dim])
        wanted = tuple(steps)
    return None if wanted == stride else wanted


def has_idle_strides(shape: Sequence[Any]) -> bool:
    """Whether a dimension has size 0 or 1, so that its stride does not matter. Symbolic sizes do not count."""
    return any(isinstance(size, int) and size < 2 for size in shape)
