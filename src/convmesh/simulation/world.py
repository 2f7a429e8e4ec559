"""State shared by simulated ranks: the store, and the pending communications of each group."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch

from .. import _torch, comm
from ..sharding.debug.rendezvous import Fingerprint, MismatchError, disagreement
from .collectives import Call, copy_into, hidden_from_autograd
from .turns import Turns

_REMEDY = (
    "let all ranks run the same operators on distributed tensors, in the same order, with the same arguments; look for "
    "an `if` that depends on the rank or on its data"
)


class World:
    """All ranks of a simulation, with their turns, store and groups."""

    def __init__(self, shape: tuple[int, ...], names: tuple[str, ...] | None):
        self.size = torch.Size(shape).numel()
        self.turns = Turns(self.size, self._deadlock)
        self.store = Store(self.turns)
        self._shape, self._names = shape, names
        self._groups: dict[tuple[str, tuple[int, ...]], Meetings] = {}

    def meetings_of(self, name: str, ranks: tuple[int, ...]) -> Meetings:
        """Return the pending communications of a group.

        All its ranks use one name; groups that share a name share no rank.
        """
        return self._groups.setdefault((name, ranks), Meetings(self, ranks))

    def coordinate(self, rank: int) -> str:
        """Return a rank as text, with its coordinates in the mesh."""
        places = [int(place) for place in torch.unravel_index(torch.tensor(rank), self._shape)]
        named = self._names or [f"dim {number}" for number in range(len(places))]
        return f"rank {rank} ({', '.join(f'{name}={place}' for name, place in zip(named, places, strict=True))})"

    def where(self, rank: int) -> str:
        """Return the place in the user's code where a rank is."""
        thread = self.turns.ranks[rank].thread
        frame = None if thread is None or thread.ident is None else sys._current_frames().get(thread.ident)
        return (comm.caller(frame) if frame is not None else None) or "an unknown location"

    def _deadlock(self) -> Exception:
        lines: dict[str, list[int]] = {}
        for rank in self.turns.ranks:
            does = rank.ended or f"waits for {rank.waits_for()}, at {self.where(rank.number)}"
            lines.setdefault(does, []).append(rank.number)
        each = "\n".join(f"  {describe_ranks(ranks)}: {does}" for does, ranks in lines.items())
        return MismatchError(f"deadlock: all ranks wait\n{each}\n  remedy: {_REMEDY}")


def describe_ranks(ranks: Iterable[int]) -> str:
    """Return ranks as text: 'rank 3', or 'ranks 0-2, 5'."""
    found = sorted(ranks)
    spans: list[list[int]] = []
    for rank in found:
        if spans and spans[-1][-1] == rank - 1:
            spans[-1].append(rank)
        else:
            spans.append([rank])
    said = ", ".join(str(span[0]) if len(span) == 1 else f"{span[0]}-{span[-1]}" for span in spans)
    return f"rank{'s' if len(found) > 1 else ''} {said}"


@dataclass(eq=False)
class Meeting:
    """One collective of a group, with the calls of the ranks that have reached it."""

    group: Meetings
    calls: dict[int, Call] = field(default_factory=dict)
    done: bool = False

    def describe(self) -> str:
        what = next(iter(self.calls.values())).what
        missing = [rank for place, rank in enumerate(self.group.ranks) if place not in self.calls]
        return f"{what} among {describe_ranks(self.group.ranks)}, to which {describe_ranks(missing)} did not come"


@dataclass(eq=False)
class Message:
    """A point-to-point message that only one side, sender or receiver, has reached."""

    group: Meetings
    tensor: torch.Tensor
    source: int | None  # None: from any rank
    to: int
    tag: int
    sends: bool
    done: bool = False

    def describe(self) -> str:
        ranks = self.group.ranks
        other = f"rank {ranks[self.to]} to receive" if self.sends else (
            "some rank to send" if self.source is None else f"rank {ranks[self.source]} to send")  # fmt: skip
        return f"{other} {tuple(self.tensor.shape)} {self.tensor.dtype}, tag {self.tag}"

    def fits(self, other: Message) -> bool:
        same = self.source == other.source or None in (self.source, other.source)
        return self.sends != other.sends and self.to == other.to and self.tag == other.tag and same


@dataclass(eq=False)
class Meetings:
    """The communications of one group that not all of its ranks have reached."""

    world: World
    ranks: tuple[int, ...]
    under_way: dict[int, Meeting] = field(default_factory=dict)
    messages: list[Message] = field(default_factory=list)

    def join(self, place: int, number: int, call: Call) -> Meeting:
        """Join the collective number `number` of the group; the last rank to join executes it."""
        self.world.turns.check()
        assert self.world.turns.current.number == self.ranks[place], "a rank communicates through groups of its own"
        meeting = self.under_way.setdefault(number, Meeting(self))
        meeting.calls[place] = call
        if call.what != next(iter(meeting.calls.values())).what:
            self._refuse(meeting)
        if len(meeting.calls) == len(self.ranks):
            del self.under_way[number]
            calls = [meeting.calls[place] for place in range(len(self.ranks))]
            if call.by_rank and disagreement(self._fingerprints(meeting, False)) is not None:
                self._refuse(meeting)
            with hidden_from_autograd(calls):
                call.run(calls)
            meeting.done = True
            meeting.calls = {}
        return meeting

    def exchange(self, tensor: torch.Tensor, source: int | None, to: int, tag: int, sends: bool) -> Message:
        """Send a message, or receive one; it is transferred when the other side comes too."""
        self.world.turns.check()
        message = Message(self, tensor, source, to, tag, sends)
        other = next((waiting for waiting in self.messages if message.fits(waiting)), None)
        if other is None:
            self.messages.append(message)
            return message
        self.messages.remove(other)
        sent, received = (message, other) if sends else (other, message)
        if (sent.tensor.numel(), sent.tensor.dtype) != (received.tensor.numel(), received.tensor.dtype):
            sender, receiver = (describe_ranks([self.ranks[rank]]) for rank in (sent.source or 0, to))
            raise MismatchError(
                f"{sender} sends {tuple(sent.tensor.shape)} {sent.tensor.dtype}, "
                f"and {receiver} receives {tuple(received.tensor.shape)} {received.tensor.dtype}"
            )
        with _torch.no_modes(), torch.no_grad():
            copy_into(received.tensor, sent.tensor)
        received.source = sent.source
        message.done = other.done = True
        return message

    def _fingerprints(self, meeting: Meeting, located: bool = True) -> list[Fingerprint]:
        return [
            Fingerprint(one.what, (), one.sends, one.receives, self.world.where(self.ranks[place]) if located else "")
            for place, one in sorted(meeting.calls.items())
        ]

    def _refuse(self, meeting: Meeting) -> None:
        lines: dict[str, list[int]] = {}
        fingerprints = self._fingerprints(meeting)
        for place, one in zip(sorted(meeting.calls), fingerprints, strict=True):
            lines.setdefault(str(one), []).append(self.ranks[place])
        each = "\n".join(f"  {describe_ranks(ranks)}: {does}" for does, ranks in lines.items())
        why = disagreement(fingerprints)
        error = MismatchError(
            f"{describe_ranks(self.ranks)} are not doing the same: {why}\n{each}\n  remedy: {_REMEDY}"
        )
        self.world.turns.fail(error, None)  # effective also if this rank's function catches it
        raise error


class Store(_torch.Store):
    """The store of the simulated ranks. Its methods have the names that torch calls."""

    def __init__(self, turns: Turns):
        super().__init__()
        self._turns = turns
        self._values: dict[str, bytes] = {}

    def set(self, key: str, value: str | bytes) -> None:
        self._values[key] = value.encode() if isinstance(value, str) else value

    def get(self, key: str) -> bytes:
        self.wait([key])
        return self._values[key]

    def add(self, key: str, value: int) -> int:
        total = int(self._values.get(key, b"0")) + value
        self.set(key, str(total))
        return total

    def check(self, keys: list[str]) -> bool:
        if not self._has(keys):
            self._turns.yield_turn()
        return self._has(keys)

    def wait(self, keys: list[str], timeout: Any = None) -> None:
        self._turns.wait(lambda: self._has(keys), lambda: f"{', '.join(keys)} in the store")

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        wanted, new = (value.encode() if isinstance(value, str) else value for value in (expected, desired))
        if self._values.get(key, b"") == wanted:
            self._values[key] = new
        return self._values.get(key, wanted)

    def delete_key(self, key: str) -> bool:
        return self._values.pop(key, None) is not None

    def num_keys(self) -> int:
        return len(self._values)

    deleteKey, getNumKeys, compareSet = delete_key, num_keys, compare_set  # noqa: N815

    def _has(self, keys: list[str]) -> bool:
        return all(key in self._values for key in keys)
