"""Ranks that are about to communicate tell each other, through a store, what they are about to do.

The store and not the group itself: a rank that never comes must not block the others, and they should say who it is.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import product

import torch.distributed as dist

from .. import _torch, comm
from .errors import ShardingError

# What is waited for is mostly there at once; later a rank need not ask so often.
_FIRST_PAUSE, _LONGEST_PAUSE = 0.0005, 0.05
# Who waits for longer than this says where it is, and looks whether another rank has failed.
_PATIENCE = 1.0
_SHOWN = 5


class MismatchError(ShardingError):
    """Ranks are not doing the same thing. The message says what each of them does, and where in the user's code."""


@dataclass(frozen=True)
class Fingerprint:
    """One communication of one rank: `what` and `operators` must be the same on all ranks of the group.

    `operators` are those on distributed data since the last communication; `sends` and `receives` are numbers of
    elements by rank, for a communication in which these differ; `where` is the place in the user's code.
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
    """Return when all ranks of the group have come to their communication `number`, and all mean the same one."""
    store, here, ranks = _torch.store(), dist.get_rank(), dist.get_process_group_ranks(group)
    # Groups that are split off together may share a name, but no rank.
    prefix = f"convmesh/check/{group.group_name}/{ranks[0]}"
    keys = [f"{prefix}/{number}/{rank}" for rank in ranks]
    store.set(f"{prefix}/{number}/{here}", mine.pack())
    _await(store, dict(zip(ranks, keys, strict=True)), mine, group, timeout)
    prints = {rank: Fingerprint.unpack(store.get(key)) for rank, key in zip(ranks, keys, strict=True)}
    if number:  # all are here, so all have read what was written for the communication before
        store.delete_key(f"{prefix}/{number - 1}/{here}")
    difference = disagreement(list(prints.values()))
    if difference is not None:
        raise _stop(f"{comm.describe(group)} are not doing the same: {difference}", prints)


def disagreement(prints: Sequence[Fingerprint]) -> str | None:
    """How the ranks differ, None if they do not: the same on every rank, since every rank looks at all of them."""
    if len({one.operators for one in prints}) > 1:
        return "they have run different operators since their last communication"
    if len({one.what for one in prints}) > 1:
        return "their communications differ"
    for (i, one), (j, other) in product(enumerate(prints), repeat=2):
        if one.sends and one.sends[j] != other.receives[i]:
            return "what one sends is not what another expects"
    return None


def _await(
    store: _torch.Store,
    keys: dict[int, str],
    mine: Fingerprint,
    group: dist.ProcessGroup,
    timeout: float,
) -> None:
    begun, pause, waiting = time.monotonic(), _FIRST_PAUSE, f"convmesh/check/waiting/{dist.get_rank()}"
    said = False
    while not store.check(list(keys.values())):
        waited = time.monotonic() - begun
        if waited > _PATIENCE and not said:
            store.set(waiting, f"{mine}, for {comm.describe(group)}")
            said = True
        if said and (failure := comm.posted()) is not None:
            raise _stop(f"another rank has stopped: {failure}", {dist.get_rank(): mine})
        if waited > timeout:
            raise _missing(store, keys, mine, group, timeout)
        time.sleep(pause)
        pause = min(2 * pause, _LONGEST_PAUSE)
    if said:
        store.delete_key(waiting)


def _missing(
    store: _torch.Store,
    keys: dict[int, str],
    mine: Fingerprint,
    group: dist.ProcessGroup,
    timeout: float,
) -> MismatchError:
    absent = [rank for rank, key in keys.items() if not store.check([key])]
    elsewhere = {rank: f"convmesh/check/waiting/{rank}" for rank in absent}
    places = [
        f"rank {rank} waits in {store.get(key).decode()}" if store.check([key]) else f"rank {rank} is not heard of"
        for rank, key in elsewhere.items()
    ]
    return _stop(
        f"not all of {comm.describe(group)} came within {timeout:g} seconds: {'; '.join(places)}",
        {dist.get_rank(): mine},
    )


def _stop(reason: str, prints: dict[int, Fingerprint]) -> MismatchError:
    """The error, which other ranks are told of, too: those that are in no group with this rank's would only wait."""
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
