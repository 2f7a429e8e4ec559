"""Messages between CPU ranks of one machine through shared memory.

gloo hands each message to a thread, which hands it to the kernel, and the same again on the other side: half a
millisecond for values per channel, and more where all cores compute. Here a message arrives some microseconds after it
was written.
"""

from __future__ import annotations

import ctypes
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from math import prod
from threading import RLock
from typing import TypeVar
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from ... import _torch
from .neighbour import Address, Neighbour
from .outbox import ORDERED, POSTED, READ, SLOTS, OwnOutbox

T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class Letter:
    """A message round that this rank has to receive: `sizes[r]` bytes from each rank `r`."""

    mailbox: Mailbox
    number: int
    result: torch.Tensor
    sizes: Sequence[int]


# Letters that were posted and not yet read, by the storage address of the result.
_letters: dict[int, Letter] = {}


class Mailbox:
    """The messages of a group. All ranks number them alike, because all communicate in the same order."""

    def __init__(self, here: int, own: OwnOutbox, others: Mapping[int, Neighbour]) -> None:
        """`here` is this rank's number in the group; `others` maps the numbers of the other ranks."""
        self._here, self._own, self._others = here, own, others
        self._posted = 0
        self._awaited: deque[Letter] = deque()
        self._lock = RLock()

    def post(self, buffer: torch.Tensor, receive: Sequence[int], send: Sequence[int]) -> torch.Tensor:
        """Post `send[r]` rows of `buffer` for each rank `r`; return the result, which is filled by `collect`."""
        if sum(send) != len(buffer) or send[self._here] != receive[self._here]:
            raise RuntimeError(f"{len(buffer)} rows cannot be sent as {list(send)} and received as {list(receive)}")
        buffer = buffer.contiguous()
        result = buffer.new_empty((sum(receive), *buffer.shape[1:]))
        row = buffer.element_size() * prod(buffer.shape[1:])
        source, sizes = buffer.data_ptr(), [count * row for count in receive]
        parts = []
        for rank, count in enumerate(send):
            if rank == self._here:
                ctypes.memmove(result.data_ptr() + sum(sizes[:rank]), source, count * row)
            parts.append((source, 0 if rank == self._here else count * row))
            source += count * row
        with self._lock:
            self._make_room()
            self._posted += 1
            self._own.write(self._posted, parts)
            letter = Letter(self, self._posted, result, sizes)
            self._awaited.append(letter)
            _letters[_torch.memory_of(result)] = letter
        return result

    def _make_room(self) -> None:
        """Read the messages that have arrived, as they may never be awaited, and make room for another one."""
        others = self._others.values()
        while self._awaited and all(other.box.words[POSTED] >= self._awaited[0].number for other in others):
            self._read_next()
        for other in others:
            other.wait_for(READ, self._posted + 1 - SLOTS)
        self._own.forget(min((other.box.words[READ] for other in others), default=self._posted))

    def read(self, number: int) -> None:
        """Wait for the messages up to `number`, and read them."""
        with self._lock:
            while self._awaited and self._awaited[0].number <= number:
                self._read_next()

    def _read_next(self) -> None:
        letter = self._awaited[0]
        target = letter.result.data_ptr()
        for rank, size in enumerate(letter.sizes):
            if rank != self._here:
                self._others[rank].read(letter.number, target, size)
            target += size
        self._awaited.popleft()
        del _letters[_torch.memory_of(letter.result)]
        self._own.words[READ] = letter.number  # now the sender may reuse the space


def collect(tensor: torch.Tensor) -> None:
    """Wait for a tensor that is received by mail, or a view of one. Does nothing for other tensors."""
    letter = _letters.get(_torch.memory_of(tensor))
    if letter is not None:
        letter.mailbox.read(letter.number)


def collect_all() -> None:
    for letter in list(_letters.values()):
        letter.mailbox.read(letter.number)


_mailboxes: WeakKeyDictionary[dist.ProcessGroup, Mailbox | None] = WeakKeyDictionary()


def mailbox_of(group: dist.ProcessGroup) -> Mailbox | None:
    """Return the mailbox of a group, or None if its ranks are not all on one machine.

    The first call communicates: all ranks of the group must make it at the same point.
    """
    if group not in _mailboxes:
        _mailboxes[group] = _open(group)
    return _mailboxes[group]


def _open(group: dist.ProcessGroup) -> Mailbox | None:
    """Open a group's mailbox: exchange the addresses of all outboxes, and agree on whether all could be opened."""
    own = others = None
    try:
        own = OwnOutbox() if ORDERED and _torch.is_gloo(group) else None
        address = None if own is None else Address.of(own)
    except (OSError, AttributeError):  # a system other than Linux, or one that does not permit it
        address = None
    addresses = _gather_objects(address, group)
    if own is not None and None not in addresses:
        with suppress(OSError, AttributeError):
            others = _open_neighbours(addresses, group)
    all_found = all(_gather_objects(others is not None, group))
    return Mailbox(group.rank(), own, others) if all_found and own is not None and others is not None else None


def _open_neighbours(addresses: Sequence[Address | None], group: dist.ProcessGroup) -> dict[int, Neighbour]:
    ranks, here = dist.get_process_group_ranks(group), group.rank()
    seconds = _torch.timeout_of(group, "cpu").total_seconds()
    return {
        number: Neighbour(address, ranks[number], here, seconds)
        for number, address in enumerate(addresses)
        if number != here and address is not None
    }


def _gather_objects(value: T, group: dist.ProcessGroup) -> list[T]:
    """Return the values of all ranks."""
    answers: list[T] = [value] * group.size()
    dist.all_gather_object(answers, value, group=group)
    return answers
