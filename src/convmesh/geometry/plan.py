"""Along one line of ranks: what each owns, what each must hold, and so what travels."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from .interval import Interval


@dataclass(frozen=True)
class HaloPlan:
    """A dimension of `size` indices, of which rank `r` owns `owned[r]` and must hold `needed[r]` to compute.

    `needed` may overhang [0, size): nobody owns what lies there, so it is not sent.
    What rank r holds beside `needed[r]` it has no use for here, and it is not sent either.
    """

    size: int
    owned: tuple[Interval, ...]
    needed: tuple[Interval, ...]

    def transfer(self, src: int, dst: int) -> Interval:
        """What `src` sends `dst`. The adjoint travels the other way and adds."""
        return self.owned[src] & self.needed[dst] if src != dst else Interval(0, 0)

    @cached_property
    def silent(self) -> bool:
        """Nothing travels between any two ranks: all of them can leave the exchange out."""
        return not any(self.sends(rank) for rank in range(len(self.owned)))

    def sends(self, rank: int) -> list[tuple[int, Interval]]:
        """What leaves `rank`: (destination, indices) in the order of the ranks."""
        pairs = [(dst, self.transfer(rank, dst)) for dst in range(len(self.owned))]
        return [(dst, part) for dst, part in pairs if part]

    def receives(self, rank: int) -> list[tuple[int, Interval]]:
        """What reaches `rank`: (source, indices), in the order of the ranks and so of the indices."""
        pairs = [(src, self.transfer(src, rank)) for src in range(len(self.owned))]
        return [(src, part) for src, part in pairs if part]
