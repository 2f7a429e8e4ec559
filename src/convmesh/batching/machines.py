"""The facts that algorithms are chosen by: those of this machine, those that the ranks of a mesh agreed on, or none.

If ranks chose each for itself, replicated results would differ in the last bits. So a job of one process uses all that
it knows about its machine. Ranks of a mesh use what they have agreed on, in the first call in which all take part. For
plain tensors, which a rank may use alone, only facts that hold everywhere count, unless all ranks have called `agree`
before.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.placement_types import Placement, Replicate

from .. import _torch, kernels
from ..comm import agreed, of_first_rank
from .algorithms import Machine

# This one.
OWN = Machine(lambda: kernels.available())
# Any machine: no kernels, which would have to be compiled.
ANY = Machine(lambda: False)
# Those that have agreed that all of them have the same kernels.
WITH_KERNELS = Machine(lambda: True)

_agreed_for_plain: Machine | None = None


def of_plain_tensors() -> Machine:
    """Return the facts for plain tensors, for which no other rank can be asked."""
    if _agreed_for_plain is not None:
        return _agreed_for_plain
    return ANY if dist.is_initialized() and dist.get_world_size() > 1 else OWN


def agreed_machine() -> Machine | None:
    return _agreed_for_plain


def agree(machine: Machine | None) -> None:
    """Use these facts for plain tensors from now on. All ranks that must choose alike call this."""
    global _agreed_for_plain
    _agreed_for_plain = machine


def machine_of(mesh: DeviceMesh) -> Machine:
    """Return the facts that all ranks of a mesh share. All of them must call this."""
    return Ranks(mesh, together=True).machine()


@contextmanager
def agreed_on(mesh: DeviceMesh, placements: Sequence[Placement]) -> Iterator[None]:
    """Context manager for plain tensors that are local tensors on `mesh`: all its ranks choose alike for them."""
    before = agreed_machine()
    agree(Ranks.that_share(mesh, placements).machine())
    try:
        yield
    finally:
        agree(before)


@dataclass(frozen=True)
class Ranks:
    """The ranks that compute one call on a mesh; `together` if it is certain that all of them do."""

    mesh: DeviceMesh
    together: bool
    call: Hashable = None  # what all of them know of it

    @classmethod
    def that_share(cls, mesh: DeviceMesh, placements: Sequence[Placement], call: Hashable = None) -> Ranks:
        """Return the ranks of a call on these operands. Only some ranks may use a replicated operand."""
        return cls(mesh, any(placement != Replicate() for placement in placements), call)

    def machine(self) -> Machine:
        """Return the facts that they share: compiled kernels, for CPUs, if all have the same ones."""
        asked = self.mesh, self.together
        if self.mesh.device_type not in kernels.COMPILED_FOR or not agreed("kernels", kernels.available, *asked):
            return ANY
        vectors = of_first_rank("vectors of kernels", _vectors, *asked)
        alike = agreed(f"kernels with vectors of {vectors} bytes", lambda: _vectors() == vectors, *asked)
        return WITH_KERNELS if alike else ANY

    def by_the_first(self, say: Callable[[], str], dtype: str) -> str | None:
        """Return the first rank's answer about this call, on all ranks; None if not all of them take part."""
        with _torch.no_modes():
            is_first = dist.get_rank() == self.mesh.mesh.min().item()
        about = f"mapped convolution {self.call} of {dtype}"
        return of_first_rank(about, say if is_first else str, self.mesh, self.together)


def _vectors() -> str:
    return str(kernels.lanes(1))
