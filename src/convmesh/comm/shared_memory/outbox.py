"""Outboxes: shared memory that one rank writes its messages into and the others read them from.

Only its owner writes to it. It begins with counters: the number of messages posted, the number of the others' messages
that the owner has read, and where its last messages begin. A message exists once it is counted: the processors that
this is for (`ORDERED`) make writes visible to others in the order in which they are made.
"""

from __future__ import annotations

import ctypes
import os
import platform
from collections import deque
from collections.abc import Sequence
from itertools import accumulate
from mmap import mmap
from weakref import finalize

ORDERED = platform.machine().lower() in ("x86_64", "amd64")

WORD = 8
# Word indices of the counters. Those that other ranks poll have a cache line of their own.
POSTED, READ, STARTS = 0, 8, 16
SLOTS = 512  # the number of messages whose start is known, and so that can be under way
FIRST = -(-(STARTS + SLOTS) * WORD // 4096) * 4096
# The size that is kept when no message is left to be read; larger messages extend the file temporarily.
KEPT = FIRST + 2**24


class Outbox:
    """The outbox of one rank, as seen by its owner or by another rank."""

    def __init__(self, file: int) -> None:
        self.file = file
        self._map()

    def _map(self) -> None:
        mapped = mmap(self.file, 0)
        self.words = memoryview(mapped).cast("Q")
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(mapped))

    def address(self, start: int, size: int) -> int:
        """Return the address of `size` bytes at `start`, mapping the file again if its owner has extended it."""
        if start + size > self.words.nbytes:
            self._map()
        return self._address + start

    def find(self, number: int, rank: int) -> tuple[int, int]:
        """Return address and size of the part of message `number` for a rank."""
        place = self.words[STARTS + number % SLOTS] // WORD + rank
        self.address(place * WORD, 2 * WORD)
        start, stop = self.words[place : place + 2]
        return self.address(start, stop - start), stop - start


class OwnOutbox(Outbox):
    """The owner's side: finds room for messages and writes them."""

    def __init__(self) -> None:
        file = os.memfd_create("convmesh", os.MFD_CLOEXEC)
        finalize(self, os.close, file)
        os.ftruncate(file, KEPT)
        super().__init__(file)
        self._size = KEPT
        self._unread: deque[tuple[int, int, int]] = deque()  # number, start, stop

    def write(self, number: int, parts: Sequence[tuple[int, int]]) -> None:
        """Write message `number`: `parts` has (address, size) for every rank. A header says where each part begins."""
        header, size = (len(parts) + 1) * WORD, sum(size for _, size in parts)
        start = self._find_space(header + size)
        target = self.address(start, header + size) + header
        ends = accumulate((size for _, size in parts), initial=start + header)
        for place, end in enumerate(ends, start // WORD):
            self.words[place] = end
        for address, size in parts:
            ctypes.memmove(target, address, size)
            target += size
        self.words[STARTS + number % SLOTS] = start
        self.words[POSTED] = number  # written last: a rank that sees the count sees the message
        self._unread.append((number, start, self.words[start // WORD + len(parts)]))

    def forget(self, number: int) -> None:
        """Free the messages up to `number`, which all ranks have read."""
        while self._unread and self._unread[0][0] <= number:
            self._unread.popleft()
        if not self._unread and self._size > KEPT:
            os.ftruncate(self.file, KEPT)
            self._size = KEPT

    def _find_space(self, size: int) -> int:
        """Return the first place for `size` bytes: before, between or after the messages still to be read."""
        taken = [(start, stop) for _, start, stop in self._unread]
        places = sorted([FIRST, *(-(-stop // WORD) * WORD for _, stop in taken)])
        place = next(p for p in places if all(p + size <= start or stop <= p for start, stop in taken))
        if place + size > self._size:
            self._size = -(-2 * (place + size) // 4096) * 4096
            os.ftruncate(self.file, self._size)
        return place
