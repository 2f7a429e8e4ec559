"""Arrays that a rank reads in part: tensors, numpy arrays, memory maps, and files that can be sliced."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, prod
from typing import Any, Protocol

import numpy as np
import torch

Region = tuple[slice, ...]
_SAMPLED = 2**22  # number of elements of a large array, other than a tensor, whose values ranks compare


class ArrayLike(Protocol):
    """Any array with a shape that can be sliced: tensors, numpy arrays and memory maps, zarr, HDF5, NIfTI arrays."""

    @property
    def shape(self) -> tuple[int, ...]: ...
    def __getitem__(self, region: Region, /) -> Any: ...


@dataclass(frozen=True)
class Entry:
    """One entry along the first dimension of an array; of a file nothing is read yet."""

    array: ArrayLike
    index: int

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.array.shape[1:])

    def __getitem__(self, region: Region) -> Any:
        return self.array[(self.index, *region)]  # type: ignore[arg-type]


@dataclass(frozen=True)
class Entries:
    """An array as a data set of its entries."""

    array: ArrayLike

    def __len__(self) -> int:
        return self.array.shape[0]

    def __getitem__(self, index: int) -> Entry:
        return Entry(self.array, index)


def read(array: ArrayLike, where: Region) -> torch.Tensor:
    """Read a region of any array as a tensor. Only that region is read from a file."""
    if isinstance(array, torch.Tensor):
        return _plain(array.detach())[where]
    part = array[where]
    # Files are mapped read-only, and numpy returns such memory, which a tensor must not write to.
    return _plain(part.detach()).clone() if isinstance(part, torch.Tensor) else _copied(part)


def as_tensor(part: Any) -> torch.Tensor:
    """Convert a part that was already read to a tensor, sharing its memory if possible."""
    if isinstance(part, torch.Tensor):
        return _plain(part)
    array = np.asarray(part)
    fits = array.flags.writeable and array.dtype.isnative and all(stride >= 0 for stride in array.strides)
    return torch.from_numpy(array) if fits else _copied(array)


def _copied(part: Any) -> torch.Tensor:
    """Convert to a tensor by a copy: tensors support neither negative strides nor foreign byte orders."""
    array = np.asarray(part)
    return torch.from_numpy(np.array(array, dtype=array.dtype.newbyteorder("="), order="C", copy=True))


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    """Return a plain tensor in place of another package's subclass (MONAI's MetaTensor), as DTensor requires."""
    ours = type(tensor).__module__.startswith("torch.") or type(tensor) is torch.Tensor
    return tensor if ours else tensor.as_subclass(torch.Tensor)


def kind_of(array: ArrayLike) -> str:
    """Return "tensor", "array" (numpy, in memory) or "file": anything else; a rank reads only its region of those."""
    in_memory = (type(array).__module__, type(array).__name__) == ("numpy", "ndarray")  # a memory map is another type
    return "tensor" if isinstance(array, torch.Tensor) else "array" if in_memory else "file"


def sample(array: ArrayLike) -> torch.Tensor:
    """Return all of an array in memory, or strided samples of it if it is large and not a tensor."""
    return read(array, (slice(None),) * len(array.shape)) if isinstance(array, torch.Tensor) else some(array, _SAMPLED)


def some(array: ArrayLike, elements: int) -> torch.Tensor:
    """Return about `elements` elements: indices at a fixed step along each dimension."""
    step = ceil((prod(array.shape) / elements) ** (1 / max(1, len(array.shape))))
    return read(array, (slice(None, None, max(1, step)),) * len(array.shape))
