"""Agreement of ranks on facts that each rank only knows about itself, before any decision depends on them.

Whether there is a compiler, what a file or a clock says: if such a fact differed between ranks, they would send
different messages, or differ in the last bits of replicated values. So each rank writes its answer into the store of
the process group, once per mesh, and all ranks decide by the answers of all.

This is not a collective, so it cannot be mistaken for one: a rank waits only for ranks that ask the same question.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from hashlib import blake2b
from weakref import WeakKeyDictionary, ref

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from .. import _torch
from .failures.interception import CommunicationError

# For each world, as a new one may have other processes: the answers of all ranks of a mesh, by ascending rank.
# Meshes of the same ranks share an answer.
Asked = DeviceMesh | tuple[int, ...]
_answers: WeakKeyDictionary[dist.ProcessGroup, dict[tuple[str, Asked], list[str]]] = WeakKeyDictionary()
_occasion = ""


def agreed(fact: str, holds: Callable[[], bool], mesh: DeviceMesh | None, together: bool = True) -> bool:
    """Return whether `holds` is true on every rank of `mesh`: the same answer on all of them, asked once and then kept.

    `together` says that every rank of the mesh makes this call, as is the case for operators on sharded or Partial
    tensors. A replicated tensor may be used by one rank alone: there only an earlier agreement counts, and before one
    the answer is False. The answer is also False on a rank outside of the mesh, and always while a compiler traces.
    Without a mesh, or without other processes, the rank's own answer is returned.
    """
    answers = _everybodys(fact, lambda: str(holds()), mesh, together)
    return answers is not None and answers.count("True") == len(answers)


class Agreed:
    """`agreed` on one mesh, for callers that ask on every call: caches the answer."""

    def __init__(self, fact: str, holds: Callable[[], bool], mesh: DeviceMesh):
        self._asked = fact, lambda: str(holds()), mesh
        self._occasion: object = None
        self._world: Callable[[], dist.ProcessGroup | None] = lambda: None
        self._holds = False

    def __call__(self, together: bool) -> bool:
        if _torch.tracing():
            return False
        world = dist.group.WORLD
        if self._occasion is not _answers or self._world() is not world:
            answers = _everybodys(*self._asked, together)
            if answers is None or world is None:
                return False
            self._occasion, self._world = _answers, ref(world)
            self._holds = answers.count("True") == len(answers)
        return self._holds


def of_first_rank(fact: str, say: Callable[[], str], mesh: DeviceMesh | None, together: bool = True) -> str | None:
    """Return the first rank's answer on all ranks of `mesh`; None where `agreed` would return False without asking."""
    answers = _everybodys(fact, say, mesh, together)
    return None if answers is None else answers[0]


def of_all_ranks(fact: str, say: Callable[[], str], mesh: DeviceMesh) -> dict[str, list[int]]:
    """Return the answers of the ranks of `mesh`, which all make this call, and the ranks that gave each."""
    said: dict[str, list[int]] = {}
    for rank, answer in zip(_ranks(mesh), _everybodys(fact, say, mesh, True) or (), strict=False):
        said.setdefault(answer, []).append(rank)
    return said


@contextmanager
def asked_anew(occasion: str) -> Iterator[None]:
    """Context manager in which all agreements are made anew, then dropped; all ranks must pass the same `occasion`."""
    global _answers, _occasion
    before = _answers, _occasion
    _answers, _occasion = WeakKeyDictionary(), occasion
    try:
        yield
    finally:
        _answers, _occasion = before


def _everybodys(fact: str, say: Callable[[], str], mesh: DeviceMesh | None, together: bool) -> list[str] | None:
    if _torch.tracing():
        return None
    world = dist.group.WORLD
    if mesh is None or world is None:
        return [say()]
    known = _answers.setdefault(world, {})
    found = known.get((fact, mesh))
    if found is None and together and mesh.get_coordinate() is not None:
        ranks = _ranks(mesh)
        if (fact, ranks) not in known:
            known[fact, ranks] = _ask(fact, say(), ranks, world)
        found = known[fact, mesh] = known[fact, ranks]
    return found


def _ranks(mesh: DeviceMesh) -> tuple[int, ...]:
    with _torch.no_modes():
        return tuple(sorted(mesh.mesh.flatten().tolist()))


def _ask(fact: str, mine: str, ranks: tuple[int, ...], world: dist.ProcessGroup) -> list[str]:
    if len(ranks) == 1 or _torch.is_fake(world):  # there are no other ranks
        return [mine]
    store = _torch.store()
    prefix = f"convmesh/agreed/{_occasion}/{fact}/{blake2b(repr(ranks).encode(), digest_size=8).hexdigest()}"
    keys = {rank: f"{prefix}/{rank}" for rank in ranks}
    try:
        store.set(keys[dist.get_rank()], mine)
        store.wait(list(keys.values()), _torch.timeout_of(world))
        answers = [store.get(key).decode() for key in keys.values()]
        if store.add(f"{prefix}/read", 1) == len(ranks):  # the last to read removes the keys: no later world finds them
            for key in (*keys.values(), f"{prefix}/read"):
                store.delete_key(key)
    except dist.DistError as error:
        raise CommunicationError(
            f"not all of ranks {', '.join(map(str, ranks))} have reported what they know about: {fact}\n"
            f"  reason: {error}\n"
            f"  remedy: let all ranks of a mesh run the same operators on distributed tensors; or look for the first "
            f"error in the other ranks' output"
        ) from error
    return answers
