"""New tensors for large results, in large pages.

An operating system hands out fresh memory at the first touch, page by page, and for a result of many megabytes that
can take longer than computing it: 50 of 68 ms were seen for the 150 MB of 16 gradients of a 512 -> 512 layer, and
9 ms with pages of 2 MB. Linux gives those to whoever asks for them, which torch does not.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable, Sequence

from torch import Tensor

# What is smaller comes as a rule from memory that the process has used before.
LARGE = 4 * 2**20
PAGE = 4096
MADV_HUGEPAGE = 14


def new_empty(like: Tensor, shape: Sequence[int]) -> Tensor:
    """`like.new_empty(shape)`; where that is large, in memory that is quick to touch for the first time."""
    made = like.new_empty(shape)
    # A traced tensor has neither sizes that one may ask for nor memory.
    if type(made) is Tensor and made.device.type == "cpu" and made.nbytes >= LARGE:
        _advise(made)
    return made


def new_zeros(like: Tensor, shape: Sequence[int]) -> Tensor:
    return new_empty(like, shape).zero_()


def contiguous(tensor: Tensor) -> Tensor:
    """`tensor.contiguous()`, likewise."""
    return tensor if tensor.is_contiguous() else new_empty(tensor, tensor.shape).copy_(tensor)


def _advise(tensor: Tensor) -> None:
    """Ask for large pages wherever the tensor covers whole pages. Nothing depends on whether the advice is taken."""
    if _madvise is None:
        return
    start = -(-tensor.data_ptr() // PAGE) * PAGE
    stop = (tensor.data_ptr() + tensor.nbytes) // PAGE * PAGE
    _madvise(ctypes.c_void_p(start), ctypes.c_size_t(stop - start), MADV_HUGEPAGE)


def _find_madvise() -> Callable[..., int] | None:
    if sys.platform != "linux":
        return None
    return getattr(ctypes.CDLL(None), "madvise", None)


_madvise = _find_madvise()
