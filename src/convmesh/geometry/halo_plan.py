"""Along one line of ranks: what each owns, what each must hold, and so what travels."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from .interval import Interval

Parts = tuple[Interval, ...]


@dataclass(frozen=True)
class HaloPlan:
    """A dimension of `size` indices, of which rank `r` owns `owned[r]` and must hold all of `needed[r]` to compute.

    What a rank needs may be in several parts, which do not overlap. It may overhang [0, size): nobody owns what lies
    there, so it is not sent. What a rank owns beside what it needs is left alone.
    """

    size: int
    owned: Parts
    needed: tuple[Parts, ...]

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        """Found once: plans are parts of the keys by which others are looked up, on every call."""
        return hash((self.size, self.owned, self.needed))

    def transfer(self, src: int, dst: int) -> Parts:
        """What `src` sends `dst`. The adjoint travels the other way and adds."""
        if src == dst:
            return ()
        return tuple(common for part in self.needed[dst] if (common := self.owned[src] & part))

    @cached_property
    def silent(self) -> bool:
        """Nothing travels between any two ranks: all of them can leave the exchange out."""
        return not any(self.sends(rank) for rank in range(len(self.owned)))

    def sends(self, rank: int) -> list[tuple[int, Interval]]:
        """What leaves `rank`: (destination, indices), in the order of the ranks."""
        return [(dst, part) for dst in range(len(self.owned)) for part in self.transfer(rank, dst)]

    def receives(self, rank: int) -> list[tuple[int, Interval]]:
        """What reaches `rank`: (source, indices), in the order of the ranks."""
        return [(src, part) for src in range(len(self.owned)) for part in self.transfer(src, rank)]

    @cached_property
    def travelling(self) -> int:
        """How many indices are sent in all."""
        return sum(part.size for rank in range(len(self.owned)) for _, part in self.sends(rank))
