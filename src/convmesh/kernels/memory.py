"""Memory for large results and workspaces, in large pages and used again.

An operating system hands out fresh memory at the first touch, page by page, and for a result of many megabytes that
can take longer than computing it: 50 of 68 ms were seen for the 150 MB of 16 gradients of a 512 -> 512 layer. The C
library gives large blocks back as soon as they are freed, so that every step of a training pays anew. Here they are
made of pages of 2 MB, where Linux has them, and a bounded amount of them is kept when their tensors are gone.
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

# What is smaller comes as a rule from memory that the process has used before.
LARGE = 2**20
# How much unused memory is kept at most, and how much larger than asked for a block may be.
KEPT, ROOMY = 256 * 2**20, 1.25
BLOCK = 2 * 2**20
# Systems other than Linux have no such pages, or take them by themselves.
HAS_LARGE_PAGES = hasattr(mmap, "MADV_HUGEPAGE")


# What glibc learns to keep at most.
MOST_KEPT = 32 * 2**20 - 2**14


def teach_c_library() -> None:
    """Have the C library keep blocks of up to 32 MB that are freed, as it does in any process that has freed one.

    Until then it maps memory of its own for each block and gives it back at once: results of torch's operators would be
    fresh memory, page by page, at every call, since the large blocks that it learns from are on the shelf.
    """
    torch.empty(MOST_KEPT, dtype=torch.uint8, device="cpu")


class Shelf:
    """Blocks that no tensor uses any more, the oldest first."""

    def __init__(self) -> None:
        # Blocks come back whenever a tensor dies, perhaps while this thread is in here.
        self._lock = threading.RLock()
        self._free: list[mmap.mmap] = []

    def take(self, size: int) -> memoryview:
        """At least `size` bytes, which come back when the last tensor that is made of them is gone."""
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
        """Bytes."""
        with self._lock:
            return sum(map(len, self._free))

    def _fitting(self, size: int) -> mmap.mmap | None:
        with self._lock:
            # Of several the one that came back last, which is still in caches.
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
    """`like.new_empty(shape)`; where that is large, in memory that is quick to touch."""
    # A traced tensor has neither sizes that one may ask for nor memory.
    if type(like) not in (Tensor, torch.nn.Parameter) or not like.is_cpu or not HAS_LARGE_PAGES:
        return like.new_empty(shape)
    count = prod(shape)
    if count * like.element_size() < LARGE:
        return like.new_empty(shape)
    return torch.frombuffer(shelf.take(count * like.element_size()), dtype=like.dtype, count=count).view(*shape)


def contiguous(tensor: Tensor) -> Tensor:
    """`tensor.contiguous()`, likewise."""
    return tensor if tensor.is_contiguous() else new_empty(tensor, tensor.shape).copy_(tensor)
