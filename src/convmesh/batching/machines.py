"""The machines that choose algorithms: this one; those of a mesh, once they have agreed; and any machine at all.

Ranks that choose each for itself get results that differ in their last bits where they should be replicated. So a
process that is alone goes by all it knows. Ranks of a mesh go by what they have agreed upon, at the first call in which
all of them take part. And a rank that computes with plain tensors, which it may do alone, goes by what every rank knows
without asking, unless all of them agreed on more beforehand (`agree`).
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
    """By which this rank chooses for tensors that it alone knows of: nothing may be asked here."""
    if _agreed_for_plain is not None:
        return _agreed_for_plain
    return ANY if dist.is_initialized() and dist.get_world_size() > 1 else OWN


def agreed_machine() -> Machine | None:
    return _agreed_for_plain


def agree(machine: Machine | None) -> None:
    """Choose by this one for plain tensors from now on, if any: all ranks that have to choose alike do this."""
    global _agreed_for_plain
    _agreed_for_plain = machine


def machine_of(mesh: DeviceMesh) -> Machine:
    """What its ranks have alike. Each of them makes this call."""
    return Ranks(mesh, together=True).machine()


@contextmanager
def agreed_on(mesh: DeviceMesh, placements: Sequence[Placement]) -> Iterator[None]:
    """Plain tensors in here are local tensors of a batch on `mesh`: all its ranks choose alike for them."""
    before = agreed_machine()
    agree(Ranks.that_share(mesh, placements).machine())
    try:
        yield
    finally:
        agree(before)


@dataclass(frozen=True)
class Ranks:
    """Those that compute one call on a mesh; `together` if it is certain that each of them does."""

    mesh: DeviceMesh
    together: bool
    call: Hashable = None  # what all of them know of it

    @classmethod
    def that_share(cls, mesh: DeviceMesh, placements: Sequence[Placement], call: Hashable = None) -> Ranks:
        """What is replicated a rank may use alone."""
        return cls(mesh, any(placement != Replicate() for placement in placements), call)

    def machine(self) -> Machine:
        """What they have alike: kernels, which are for CPUs, if all have the same."""
        asked = self.mesh, self.together
        if self.mesh.device_type not in kernels.COMPILED_FOR or not agreed("kernels", kernels.available, *asked):
            return ANY
        vectors = of_first_rank("vectors of kernels", _vectors, *asked)
        alike = agreed(f"kernels with vectors of {vectors} bytes", lambda: _vectors() == vectors, *asked)
        return WITH_KERNELS if alike else ANY

    def by_the_first(self, say: Callable[[], str], dtype: str) -> str | None:
        """What the first rank says about this call. The others are not asked, and None is said where nobody is."""
        with _torch.no_modes():
            is_first = dist.get_rank() == self.mesh.mesh.min().item()
        about = f"mapped convolution {self.call} of {dtype}"
        return of_first_rank(about, say if is_first else str, self.mesh, self.together)


def _vectors() -> str:
    return str(kernels.lanes(1))
