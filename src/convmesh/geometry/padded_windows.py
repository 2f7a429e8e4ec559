"""Windows that overlap and differ in length, copied to windows of one length, for a pooling with a fixed window."""

from __future__ import annotations

from dataclasses import dataclass

from .adaptive_windows import AdaptiveWindows
from .interval import Interval


@dataclass(frozen=True)
class PaddedWindows:
    """Windows of `width` indices without overlap; index `i` of them all is a copy of the source `positions[i]`.

    A shorter window is padded with copies of its last source, which change no maximum and not where it is found first.
    """

    width: int
    positions: tuple[int, ...]

    @staticmethod
    def of(windows: AdaptiveWindows, sources: Interval, targets: Interval) -> PaddedWindows:
        """What the windows of `targets` read of `sources`; positions count from the first of these."""
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
        """The sources themselves are the windows."""
        return self.positions == tuple(range(len(self.positions)))
