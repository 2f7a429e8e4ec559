"""Windows that overlap and differ in length, copied into disjoint ones of equal length for a fixed-window pooling."""

from __future__ import annotations

from dataclasses import dataclass

from .adaptive_windows import AdaptiveWindows
from .interval import Interval


@dataclass(frozen=True)
class PaddedWindows:
    """Disjoint windows of `width` indices; index `i` of their concatenation is a copy of source `positions[i]`.

    A shorter window is padded with copies of its last source, which change neither a maximum nor its first position.
    """

    width: int
    positions: tuple[int, ...]

    @staticmethod
    def of(windows: AdaptiveWindows, sources: Interval, targets: Interval) -> PaddedWindows:
        """Return what the windows of `targets` read of `sources`; positions count from the first of `sources`."""
        here = [windows.window(target) & sources for target in range(targets.start, targets.stop)]
        width = max((len(window) for window in here), default=1)
        return PaddedWindows(
            width,
            tuple(
                min(index, window.stop - 1) - sources.start
                for window in here
                for index in range(window.start, window.start + width)
            ),
        )

    @property
    def trivial(self) -> bool:
        """Whether the windows are the sources themselves, in order."""
        return self.positions == tuple(range(len(self.positions)))
