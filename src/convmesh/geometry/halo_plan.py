"""Halos along one line of ranks: what each owns, what each needs, and so what each sends."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise

from .interval import Interval, hull

Parts = tuple[Interval, ...]


@dataclass(frozen=True)
class HaloPlan:
    """A dimension of `size` indices, of which rank `r` owns `owned[r]` and must hold all of `needed[r]` to compute.

    What a rank needs may be in several parts, which do not overlap. It may overhang [0, size), where an operator pads:
    nobody owns that, so it is not sent.
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
        """What `src` sends `dst`. In the adjoint `dst` sends it to `src`, which adds it."""
        if src == dst:
            return ()
        return tuple(common for part in self.needed[dst] if (common := self.owned[src] & part))

    @cached_property
    def silent(self) -> bool:
        """No rank sends anything: all of them can leave the exchange out."""
        return not any(self.sends(rank) for rank in range(len(self.owned)))

    def sends(self, rank: int) -> list[tuple[int, Interval]]:
        """What `rank` sends: (destination, indices), in the order of the ranks."""
        return [(dst, part) for dst in range(len(self.owned)) for part in self.transfer(rank, dst)]

    def receives(self, rank: int) -> list[tuple[int, Interval]]:
        """What `rank` receives: (source, indices), in the order of the ranks."""
        return [(src, part) for src in range(len(self.owned)) for part in self.transfer(src, rank)]

    @cached_property
    def sent(self) -> int:
        """How many indices all ranks send together."""
        return sum(part.size for rank in range(len(self.owned)) for _, part in self.sends(rank))

    @cached_property
    def contributions(self) -> tuple[HaloPlan, tuple[Parts, ...]]:
        """The adjoint as a halo plan: ranks own contributions to what they need here, and owners of that need these.

        Contributions are numbered one rank after the other. Also returns what each rank needs by its index here.
        """
        needed = [hull(parts) for parts in self.needed]
        bounds = list(accumulate(map(len, needed), initial=0))
        numbers: list[Parts] = []
        indices: list[Parts] = []
        for own in self.owned:
            common = [(part & own, start - part.start) for part, start in zip(needed, bounds, strict=False)]
            indices.append(tuple(part for part, _ in common if part))
            numbers.append(tuple(part.shift(by) for part, by in common if part))
        return HaloPlan(bounds[-1], tuple(Interval(*pair) for pair in pairwise(bounds)), tuple(numbers)), tuple(indices)
