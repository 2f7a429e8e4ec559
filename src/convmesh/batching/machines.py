"""The machines that choose algorithms: this one; those of a mesh, once they have agreed; and any machine at all.

Ranks that choose each for itself get results that differ in their last bits where they should be replicated. So a
process that is alone goes by all it knows. Ranks of a mesh go by what they have agreed upon, at the first call in which
all of them take part. And a rank that computes with plain tensors, which it may do alone, goes by what every rank knows
without asking, unless all of them agreed on more beforehand (`agree`).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.placement_types import Placement, Replicate

from .. import _torch, kernels
from ..comm import agreed, of_first_rank
from . import cost, memory
from .algorithms import Machine

# This one. Looked up each time, since a calibration changes prices.
OWN = Machine(lambda: cost.price_table(), lambda: kernels.available(), lambda: memory.returns_large_blocks())
# Any machine: what is built in, no kernels that would have to be compiled, and the C library as it is unless told.
ANY = Machine(lambda: cost.built_in(), lambda: False, lambda: True)

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
        """What they have alike: the prices of the first one, and kernels if all have the same. These are for CPUs."""
        asked = self.mesh, self.together
        first = of_first_rank("machine of mapped convolutions", _described, *asked)
        if first is None:
            return ANY
        has_kernels = self.mesh.device_type in kernels.COMPILED_FOR and agreed("kernels", kernels.available, *asked)
        if has_kernels:
            vectors = of_first_rank("vectors of kernels", _vectors, *asked)
            has_kernels = agreed(f"kernels with vectors of {vectors} bytes", lambda: _vectors() == vectors, *asked)
        return _agreed(first, has_kernels)

    def by_the_first(self, say: Callable[[], str]) -> str | None:
        """What the first rank says about this call. The others are not asked, and None is said where nobody is."""
        with _torch.no_modes():
            is_first = dist.get_rank() == self.mesh.mesh.min().item()
        return of_first_rank(f"mapped convolution {self.call}", say if is_first else str, self.mesh, self.together)


def _described() -> str:
    """This machine, for the others."""
    source, prices = cost.calibration()
    return json.dumps({"source": source, "prices": prices, "returns": memory.returns_large_blocks()})


def _vectors() -> str:
    return str(kernels.lanes(1))


@lru_cache(maxsize=64)
def _agreed(first: str, has_kernels: bool) -> Machine:
    """One for each, so that what was chosen by it is found again."""
    said = json.loads(first)
    table = cost.table_of(said["source"], cost.parsed(said["prices"]))
    return Machine(lambda: table, lambda: has_kernels, lambda: said["returns"])
