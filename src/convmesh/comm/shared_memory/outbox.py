"""Memory in which one rank of a machine leaves messages, and in which the others read them.

Only its owner writes to it. In front are numbers that say how far the owner has come: how many messages it has posted,
how many of the others' it has read, and where the last of its own begin. A message is there once it is counted, because
the processors that this is for (`ORDERED`) let others see what one writes in the order in which it is written.
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
# Which word is which. Those that others look at again and again have a cache line of their own.
POSTED, READ, STARTS = 0, 8, 16
SLOTS = 512  # of so many messages it is known where they begin: so many can be on their way
FIRST = -(-(STARTS + SLOTS) * WORD // 4096) * 4096
# What stays when nothing is left to be read; a larger message has its memory made for it.
KEPT = FIRST + 2**24


class Outbox:
    """One rank's memory, as its owner or as another rank sees it."""

    def __init__(self, file: int) -> None:
        self.file = file
        self._map()

    def _map(self) -> None:
        mapped = mmap(self.file, 0)
        self.words = memoryview(mapped).cast("Q")
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(mapped))

    def address(self, start: int, size: int) -> int:
        """Of bytes in it, which the owner may have added since somebody looked at it first."""
        if start + size > self.words.nbytes:
            self._map()
        return self._address + start

    def find(self, number: int, rank: int) -> tuple[int, int]:
        """Address and size of what message `number` has for a rank."""
        place = self.words[STARTS + number % SLOTS] // WORD + rank
        self.address(place * WORD, 2 * WORD)
        start, stop = self.words[place : place + 2]
        return self.address(start, stop - start), stop - start


class OwnOutbox(Outbox):
    """With what only its owner does: finding room for messages, and writing them."""

    def __init__(self) -> None:
        file = os.memfd_create("convmesh", os.MFD_CLOEXEC)
        finalize(self, os.close, file)
        os.ftruncate(file, KEPT)
        super().__init__(file)
        self._size = KEPT
        self._unread: deque[tuple[int, int, int]] = deque()  # number, start, stop

    def write(self, number: int, parts: Sequence[tuple[int, int]]) -> None:
        """Message `number`: address and size of what it has for every rank. In front is where each part begins."""
        header, size = (len(parts) + 1) * WORD, sum(size for _, size in parts)
        start = self._room(header + size)
        target = self.address(start, header + size) + header
        ends = accumulate((size for _, size in parts), initial=start + header)
        for place, end in enumerate(ends, start // WORD):
            self.words[place] = end
        for address, size in parts:
            ctypes.memmove(target, address, size)
            target += size
        self.words[STARTS + number % SLOTS] = start
        self.words[POSTED] = number  # the last, and so whoever sees it sees the message
        self._unread.append((number, start, self.words[start // WORD + len(parts)]))

    def forget(self, number: int) -> None:
        """Everybody has read the messages up to this one."""
        while self._unread and self._unread[0][0] <= number:
            self._unread.popleft()
        if not self._unread and self._size > KEPT:
            os.ftruncate(self.file, KEPT)
            self._size = KEPT

    def _room(self, size: int) -> int:
        """The first place for so many bytes, before, between or after what has still to be read."""
        taken = [(start, stop) for _, start, stop in self._unread]
        places = sorted([FIRST, *(-(-stop // WORD) * WORD for _, stop in taken)])
        place = next(p for p in places if all(p + size <= start or stop <= p for start, stop in taken))
        if place + size > self._size:
            self._size = -(-2 * (place + size) // 4096) * 4096
            os.ftruncate(self.file, self._size)
        return place
