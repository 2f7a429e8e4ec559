"""Ranks that are about to communicate tell each other, through a store, what they are about to do.

The store is used and not the group itself, so that a rank that never comes does not block the others, which can then
report it.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import product
from typing import Any

import torch.distributed as dist

from ... import _torch, comm
from ..errors import ShardingError

# Mostly the others are there at once; after that there is no need to poll as often.
_FIRST_PAUSE, _LONGEST_PAUSE = 0.0005, 0.05
# Seconds after which a waiting rank posts where it is, and checks where the others are.
_PATIENCE = 1.0
_SHOWN = 5

Keys = dict[int, str]  # by rank, the key that it writes when it arrives


class MismatchError(ShardingError):
    """The ranks do different things. The message says what each rank does and where in your code.

    Only `enable(check=True)` raises it. It is a `ShardingError`. See [Debugging](debugging.md).
    """


@dataclass(frozen=True)
class Fingerprint:
    """One collective of one rank: `what` and `operators` must be the same on all ranks of the group.

    `operators` are those on sharded or Partial tensors since the last collective. `sends` and `receives` are numbers of
    elements by rank, for an all-to-all, in which they differ between ranks. `where` is the place in the user's code.
    """

    what: str
    operators: tuple[str, ...]
    sends: tuple[int, ...]
    receives: tuple[int, ...]
    where: str

    def pack(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def unpack(text: bytes) -> Fingerprint:
        read = json.loads(text)
        return Fingerprint(
            read["what"], tuple(read["operators"]), tuple(read["sends"]), tuple(read["receives"]), read["where"]
        )

    def __str__(self) -> str:
        sizes = f", sends {list(self.sends)}, receives {list(self.receives)}" if self.sends else ""
        operator = f" in {_clipped(self.operators[-1])}" if self.operators else ""
        return f"{self.what}{sizes}{operator}, at {self.where}"


def agree(mine: Fingerprint, group: dist.ProcessGroup, number: int, timeout: float) -> None:
    """Wait until all ranks of the group have reached their collective `number`; raise if they mean different ones."""
    store, here, ranks = _torch.store(), dist.get_rank(), dist.get_process_group_ranks(group)
    # Groups that are split off together may share a name, but have no rank in common.
    prefix = f"convmesh/check/{group.group_name}/{ranks[0]}"
    keys = [f"{prefix}/{number}/{rank}" for rank in ranks]
    store.set(f"{prefix}/{number}/{here}", mine.pack())
    _await(store, dict(zip(ranks, keys, strict=True)), mine, group, timeout)
    prints = {rank: Fingerprint.unpack(store.get(key)) for rank, key in zip(ranks, keys, strict=True)}
    if number:  # all are here, so all have read the fingerprints of the collective before
        store.delete_key(f"{prefix}/{number - 1}/{here}")
    difference = disagreement(list(prints.values()))
    if difference is not None:
        raise _stop(f"{comm.describe(group)} are not doing the same: {difference}", prints)
    comm.take_back()


def disagreement(prints: Sequence[Fingerprint]) -> str | None:
    """Return how the ranks differ, or None: the same on every rank, since every rank compares all fingerprints."""
    if len({one.operators for one in prints}) > 1:
        return "they have run different operators since their last communication"
    if len({one.what for one in prints}) > 1:
        return "their communications differ"
    for (i, one), (j, other) in product(enumerate(prints), repeat=2):
        if one.sends and one.sends[j] != other.receives[i]:
            return "what one sends is not what another expects"
    return None


def _await(store: _torch.Store, keys: Keys, mine: Fingerprint, group: dist.ProcessGroup, timeout: float) -> None:
    begun = time.monotonic()
    pause, look = _FIRST_PAUSE, _PATIENCE
    while not store.check(list(keys.values())):
        waited = time.monotonic() - begun
        if waited > min(look, timeout):
            look += _PATIENCE
            _say(store, {"text": f"{mine}, for {comm.describe(group)}", "keys": keys})
            problem = _problem(store, keys, comm.describe(group))
            if problem is None and waited > timeout:
                problem = f"not all of {comm.describe(group)} came within {timeout:g} seconds: {_absent(store, keys)}"
            if problem is not None:
                raise _stop(problem, {dist.get_rank(): mine})
        time.sleep(pause)
        pause = min(2 * pause, _LONGEST_PAUSE)
    if look > _PATIENCE:
        _say(store, None)


def _problem(store: _torch.Store, keys: Keys, group: str) -> str | None:
    """Return why waiting longer is pointless, or None."""
    if (failure := comm.posted()) is not None:
        return f"another rank has stopped: {failure}"
    return f"{group} wait for each other: {_absent(store, keys)}" if _in_a_circle(store, keys) else None


def _say(store: _torch.Store, note: object) -> None:
    """Post where this rank waits, or None.

    The key is overwritten and never deleted: getting a deleted key would block.
    """
    store.set(_waiting(dist.get_rank()), json.dumps(note))


def _waiting(rank: int) -> str:
    return f"convmesh/check/waiting/{rank}"


def _note(store: _torch.Store, rank: int) -> Any:
    """Return what another rank has posted about where it waits, or None."""
    return json.loads(store.get(_waiting(rank))) if store.check([_waiting(rank)]) else None


def _missing(store: _torch.Store, keys: Keys) -> list[int]:
    return [int(rank) for rank, key in keys.items() if not store.check([key])]


def _in_a_circle(store: _torch.Store, keys: Keys) -> bool:
    """Whether a rank that this rank waits for is itself waiting for this rank, directly or through others.

    A rank that waits for a missing key keeps waiting until the key is there, so a cycle found here is permanent.
    """
    seen: set[int] = set()
    ahead = _missing(store, keys)
    while ahead:
        rank = ahead.pop()
        if rank == dist.get_rank():
            return True
        if rank not in seen and (note := _note(store, rank)) is not None:
            missing = _missing(store, note["keys"])
            # If it has moved on in between, a key may be missing because all ranks have read it.
            ahead += missing if _note(store, rank) == note else []
        seen.add(rank)
    return False


def _absent(store: _torch.Store, keys: Keys) -> str:
    notes = {rank: _note(store, rank) for rank in _missing(store, keys)}
    return "; ".join(
        f"rank {rank} has not arrived" if note is None else f"rank {rank} waits in {note['text']}"
        for rank, note in notes.items()
    )


def _stop(reason: str, prints: dict[int, Fingerprint]) -> MismatchError:
    """Return the error, and post it for other ranks: those in no group with this rank would only wait."""
    here = dist.get_rank()
    lines = [f"rank {rank}{' (this one)' if rank == here else ''}: {one}" for rank, one in prints.items()]
    if len({one.operators for one in prints.values()}) > 1:
        lines += [f"rank {rank} ran, last of all: {_tail(one.operators)}" for rank, one in prints.items()]
    comm.post(reason)
    return MismatchError(
        "\n".join([
            reason, *(f"  {line}" for line in lines),
            "  remedy: let all ranks run the same operators on distributed tensors, in the same order, with the same "
            "arguments, and switch the check on everywhere; look for an `if` that depends on the rank or on its data",
        ])
    )  # fmt: skip


def _tail(operators: Sequence[str]) -> str:
    return ", ".join(map(_clipped, operators[-_SHOWN:])) or "nothing"


def _clipped(text: str, longest: int = 160) -> str:
    return text if len(text) <= longest else f"{text[:longest]}..."
