"""Another rank on the same machine: opening its outbox, waiting for its messages, and noticing when it ends."""

from __future__ import annotations

import ctypes
import os
import select
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Self
from weakref import finalize

from ... import _torch
from .outbox import POSTED, Outbox, OwnOutbox

NAP_MILLISECONDS = 1


@dataclass(frozen=True)
class Address:
    """The location of a rank's outbox: a file of its process, which only processes of the same machine can open."""

    machine: tuple[str, str]
    process: int
    file: int

    @classmethod
    def of(cls, box: OwnOutbox) -> Self:
        return cls(_machine(), os.getpid(), box.file)


def _machine() -> tuple[str, str]:
    """Return an id that is the same for processes that share a kernel and a PID namespace."""
    return Path("/proc/sys/kernel/random/boot_id").read_text(), os.readlink("/proc/self/ns/pid")


class Neighbour:
    """Another rank: `rank` is its number in the world, `here` this rank's number in their group."""

    def __init__(self, address: Address, rank: int, here: int, seconds: float) -> None:
        """Open the other rank's outbox; raises OSError if that is not possible."""
        if address.machine != _machine():
            raise OSError("it is on another machine")
        file = os.open(f"/proc/{address.process}/fd/{address.file}", os.O_RDWR)
        finalize(self, os.close, file)
        process = os.pidfd_open(address.process)
        finalize(self, os.close, process)
        self.box = Outbox(file)
        self._rank, self._here, self._seconds = rank, here, seconds
        self._end = select.poll()
        self._end.register(process, select.POLLIN)

    def wait_for(self, word: int, number: int) -> None:
        """Wait until a counter of the other rank has reached `number`."""
        if self.box.words[word] >= number:
            return
        start = perf_counter()
        while self.box.words[word] < number:
            waited = perf_counter() - start
            if waited < _torch.AWAKE_SECONDS:
                os.sched_yield()
            elif waited > self._seconds:
                raise RuntimeError(f"rank {self._rank} has not answered for {self._seconds:.0f} seconds")
            # Sleep until the other process ends, or for a millisecond; it may have answered before it ended.
            elif self._end.poll(NAP_MILLISECONDS) and self.box.words[word] < number:
                raise RuntimeError(f"the process of rank {self._rank} has ended")

    def read(self, number: int, target: int, size: int) -> None:
        """Wait for message `number`, and copy its part for this rank to the address `target`."""
        self.wait_for(POSTED, number)
        address, found = self.box.find(number, self._here)
        if found != size:
            raise RuntimeError(f"rank {self._rank} has sent {found} bytes where {size} were expected")
        ctypes.memmove(target, address, size)
