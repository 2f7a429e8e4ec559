"""Arrays of which a rank reads a part: tensors, numpy arrays, memory maps, and files that can be sliced."""

from __future__ import annotations

from math import ceil, prod
from typing import Any, Protocol

import numpy as np
import torch

Region = tuple[slice, ...]
_SAMPLED = 2**22  # of so many elements of an array that is no tensor yet ranks compare the values


class ArrayLike(Protocol):
    """Any array with a shape that can be sliced: tensors, numpy arrays and memory maps, zarr, HDF5, NIfTI arrays."""

    @property
    def shape(self) -> tuple[int, ...]: ...
    def __getitem__(self, region: Region, /) -> Any: ...


def read(array: ArrayLike, where: Region) -> torch.Tensor:
    """A part of any array as a tensor. Only that part is read from a file."""
    if isinstance(array, torch.Tensor):
        return _plain(array.detach())[where]
    part = array[where]
    # Files are mapped read-only, and numpy hands on such memory, which a tensor must not write to.
    return _plain(part.detach()).clone() if isinstance(part, torch.Tensor) else _copied(part)


def as_tensor(part: Any) -> torch.Tensor:
    """A part that was read already. It shares the memory, if a tensor can."""
    if isinstance(part, torch.Tensor):
        return _plain(part)
    array = np.asarray(part)
    fits = array.flags.writeable and array.dtype.isnative and all(stride >= 0 for stride in array.strides)
    return torch.from_numpy(array) if fits else _copied(array)


def _copied(part: Any) -> torch.Tensor:
    """Tensors know neither negative strides nor the byte order of another machine."""
    array = np.asarray(part)
    return torch.from_numpy(np.array(array, dtype=array.dtype.newbyteorder("="), order="C", copy=True))


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    """Without what another package has put around it (MONAI's MetaTensor): a DTensor takes plain local tensors."""
    ours = type(tensor).__module__.startswith("torch.") or type(tensor) is torch.Tensor
    return tensor if ours else tensor.as_subclass(torch.Tensor)


def kind_of(array: ArrayLike) -> str:
    """A file is all that is neither a tensor nor a numpy array in memory: a rank reads its own region of it only."""
    in_memory = (type(array).__module__, type(array).__name__) == ("numpy", "ndarray")  # a memory map is another type
    return "tensor" if isinstance(array, torch.Tensor) else "array" if in_memory else "file"


def sample(array: ArrayLike) -> torch.Tensor:
    """All of an array in memory; of a large one that is no tensor yet, some of it."""
    return read(array, (slice(None),) * len(array.shape)) if isinstance(array, torch.Tensor) else some(array, _SAMPLED)


def some(array: ArrayLike, elements: int) -> torch.Tensor:
    """About so many elements: every so many indices of each dimension."""
    step = ceil((prod(array.shape) / elements) ** (1 / max(1, len(array.shape))))
    return read(array, (slice(None, None, max(1, step)),) * len(array.shape))
