"""Memory for large results and workspaces: huge pages, reused.

The operating system maps new memory page by page, when it is first touched. For a result of many megabytes that can
take longer than computing it: 50 of 68 ms for the 150 MB of 16 gradients of a 512 -> 512 layer. The C library returns
large blocks when they are freed, so every training step would pay again. Here blocks consist of pages of 2 MB, if Linux
has them, and a bounded number of blocks is kept for reuse.
"""

from __future__ import annotations

import mmap
import threading
import weakref
from collections.abc import Sequence
from contextlib import suppress
from math import prod

import torch
from torch import Tensor

# Smaller blocks usually come from memory that the process has used before.
LARGE = 2**20
# How much unused memory is kept at most, and how much larger than asked for a block may be.
KEPT, ROOMY = 256 * 2**20, 1.25
BLOCK = 2 * 2**20
# Systems other than Linux have no such pages, or take them by themselves.
HAS_LARGE_PAGES = hasattr(mmap, "MADV_HUGEPAGE")


# What glibc learns to keep at most.
MOST_KEPT = 32 * 2**20 - 2**14


def teach_c_library() -> None:
    """Make the C library keep freed blocks of up to 32 MB, as it does in any process that has freed one.

    Until then it maps new memory for each block and returns it at once, so that results of torch's operators would be
    newly mapped at every call. Large results of convmesh, which would teach it otherwise, are not allocated by it.
    """
    torch.empty(MOST_KEPT, dtype=torch.uint8, device="cpu")


class Shelf:
    """Free blocks, kept for reuse, the oldest first."""

    def __init__(self) -> None:
        # A block may come back at any time, also while this thread holds the lock: whenever a tensor is deleted.
        self._lock = threading.RLock()
        self._free: list[mmap.mmap] = []

    def take(self, size: int) -> memoryview:
        """Return at least `size` bytes. They come back when the last tensor that uses them is deleted."""
        whole = -(-size // BLOCK) * BLOCK
        block = self._fitting(whole) or _new_block(whole)
        lease = memoryview(block)
        weakref.finalize(lease, self._give_back, block).atexit = False
        return lease

    def clear(self) -> None:
        with self._lock:
            self._free.clear()

    @property
    def kept(self) -> int:
        """The number of bytes that are kept."""
        with self._lock:
            return sum(map(len, self._free))

    def _fitting(self, size: int) -> mmap.mmap | None:
        with self._lock:
            # Among equals, the one that came back last: it may still be in the processor's cache.
            fitting = [block for block in reversed(self._free) if size <= len(block) <= ROOMY * size]
            if not fitting:
                return None
            block = min(fitting, key=len)
            self._free.remove(block)
            return block

    def _give_back(self, block: mmap.mmap) -> None:
        with self._lock:
            self._free.append(block)
            while self.kept > KEPT:
                self._free.pop(0)


def _new_block(size: int) -> mmap.mmap:
    block = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # a kernel without large pages: nothing depends on them
        block.madvise(mmap.MADV_HUGEPAGE)
    return block


shelf = Shelf()


def new_empty(like: Tensor, shape: Sequence[int]) -> Tensor:
    """Return `like.new_empty(shape)`; large tensors on CPUs get reused memory."""
    # A traced tensor has neither sizes that one may ask for nor memory.
    if type(like) not in (Tensor, torch.nn.Parameter) or not like.is_cpu or not HAS_LARGE_PAGES:
        return like.new_empty(shape)
    count = prod(shape)
    if count * like.element_size() < LARGE:
        return like.new_empty(shape)
    return torch.frombuffer(shelf.take(count * like.element_size()), dtype=like.dtype, count=count).view(*shape)


def contiguous(tensor: Tensor) -> Tensor:
    """Return `tensor.contiguous()`, in such memory."""
    return tensor if tensor.is_contiguous() else new_empty(tensor, tensor.shape).copy_(tensor)
