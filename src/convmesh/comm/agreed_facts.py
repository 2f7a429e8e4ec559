"""Facts that only a rank knows of itself, and that ranks agree upon before anything depends on them.

Whether there is a compiler, what a file or a clock says: ranks that go by these differ in what they send, or in the
last bits of what should be replicated. So each of them leaves its own answer in the store of the process group, once
for a mesh, and goes by those of all.

It is no collective, and so it cannot be taken for one. A rank waits here only for ranks that come to the same question.
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

# By world, since a new one may have other processes: what every rank of a mesh has answered, in ascending rank.
_answers: WeakKeyDictionary[dist.ProcessGroup, dict[tuple[str, DeviceMesh], list[str]]] = WeakKeyDictionary()
_occasion = ""


def agreed(fact: str, holds: Callable[[], bool], mesh: DeviceMesh | None, together: bool = True) -> bool:
    """Whether `holds` is true on every rank of `mesh`: the same answer on all of them, asked once and then kept.

    `together` says that every rank of the mesh makes this call, as all do that compute with a tensor that is sharded or
    Partial. What is replicated a rank may use alone: there only what was agreed upon before counts, and until then the
    answer is False. So it is on a rank outside of the mesh, and always while a compiler traces. Without a mesh, or
    without other processes, it is the rank's own.
    """
    answers = _everybodys(fact, lambda: str(holds()), mesh, together)
    return answers is not None and answers.count("True") == len(answers)


class Agreed:
    """`agreed` on one mesh, for who asks on every call: what was agreed upon is kept."""

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
    """What the first rank of `mesh` says, for all of them, where `agreed` would ask; None where it would answer False
    without asking."""
    answers = _everybodys(fact, say, mesh, together)
    return None if answers is None else answers[0]


@contextmanager
def asked_anew(occasion: str) -> Iterator[None]:
    """Within it nothing is agreed upon yet, and afterwards what was before; the ranks that enter name it alike."""
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
        found = known[fact, mesh] = _ask(fact, say(), mesh, world)
    return found


def _ask(fact: str, mine: str, mesh: DeviceMesh, world: dist.ProcessGroup) -> list[str]:
    with _torch.no_modes():
        ranks = sorted(mesh.mesh.flatten().tolist())
    if len(ranks) == 1 or _torch.is_fake(world):  # there is nobody else
        return [mine]
    store = _torch.store()
    prefix = f"convmesh/agreed/{_occasion}/{fact}/{blake2b(repr(ranks).encode(), digest_size=8).hexdigest()}"
    keys = {rank: f"{prefix}/{rank}" for rank in ranks}
    try:
        store.set(keys[dist.get_rank()], mine)
        store.wait(list(keys.values()), _torch.timeout_of(world))
        answers = [store.get(key).decode() for key in keys.values()]
        if store.add(f"{prefix}/read", 1) == len(ranks):  # the last one leaves nothing for a later world to find
            for key in (*keys.values(), f"{prefix}/read"):
                store.delete_key(key)
    except dist.DistError as error:
        raise CommunicationError(
            f"not all of ranks {', '.join(map(str, ranks))} have said what they know about: {fact}\n"
            f"  reason: {error}\n"
            f"  remedy: let all ranks of a mesh run the same operators on distributed tensors; or look for the first "
            f"error in the other ranks' output"
        ) from error
    return answers
