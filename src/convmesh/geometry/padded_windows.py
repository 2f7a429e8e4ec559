"""Windows of different lengths that overlap, laid side by side in slots of one length, for a plain pooling to run."""

from __future__ import annotations

from dataclasses import dataclass

from .dependence import Runs
from .interval import Interval


@dataclass(frozen=True)
class Slots:
    """`width` slots a target. Slot number `i` takes the source `positions[i]`; `spare` slots only fill up a window.

    A spare slot repeats the last source of its window, which changes no maximum and not where it is found first.
    """

    width: int
    positions: tuple[int, ...]
    spare: tuple[int, ...]

    @staticmethod
    def of(runs: Runs, sources: Interval, targets: Interval) -> Slots:
        """For windows of `targets`, of which only what lies in `sources` is there; positions count from its start."""
        windows = [runs.reads(Interval(t, t + 1)) & sources for t in range(targets.start, targets.stop)]
        width = max((len(window) for window in windows), default=1)
        positions: list[int] = []
        spare: list[int] = []
        for window in windows:
            for slot in range(width):
                if slot >= len(window):
                    spare.append(len(positions))
                positions.append(min(window.start + slot, window.stop - 1) - sources.start)
        return Slots(width, tuple(positions), tuple(spare))

    @property
    def trivial(self) -> bool:
        """The sources themselves are the slots."""
        return not self.spare and self.positions == tuple(range(len(self.positions)))
