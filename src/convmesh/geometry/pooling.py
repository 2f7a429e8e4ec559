"""The parameters of a pooling as one value: fixed or adaptive windows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import ClassVar

from .adaptive_windows import AdaptiveWindows
from .interval import Interval
from .window import Window


@dataclass(frozen=True)
class Pooling:
    """A window for each spatial dimension; with `ceil`, the last one may reach beyond the padded input."""

    windows: tuple[Window, ...]
    ceil: bool

    smallest: ClassVar = 1  # smallest permitted target size

    @property
    def spatial(self) -> int:
        return len(self.windows)

    @staticmethod
    def of(
        spatial: int,
        kernel: Sequence[int],
        stride: Sequence[int],
        padding: Sequence[int],
        dilation: Sequence[int],
        ceil: bool,
    ) -> Pooling:
        """Build one from an operator's arguments: one number is for all dimensions; stride defaults to the kernel."""

        def each(values: Sequence[int]) -> tuple[int, ...]:
            return tuple(map(int, values)) if len(values) != 1 else (int(values[0]),) * spatial

        sizes = zip(each(kernel), each(stride or kernel), each(padding), each(dilation), strict=True)
        return Pooling(tuple(Window(*numbers) for numbers in sizes), bool(ceil))

    def within(self, sizes: Sequence[int]) -> Pooling:
        """Return the same pooling for inputs of these sizes, with windows wider than the padded input cropped to it."""
        return replace(self, windows=tuple(map(self._within, self.windows, sizes)))

    def _within(self, window: Window, size: int) -> Window:
        room = size + 2 * window.padding
        if window.extent <= room or window.dilation < 1 or self._targets(window, size) != 1:
            return window
        return replace(window, kernel=(room - 1) // window.dilation + 1)

    @cached_property
    def kernel(self) -> list[int]:
        return [window.kernel for window in self.windows]

    @cached_property
    def stride(self) -> list[int]:
        return [window.stride for window in self.windows]

    @cached_property
    def dilation(self) -> list[int]:
        return [window.dilation for window in self.windows]

    def dependences(self, sizes: Sequence[int]) -> tuple[Window, ...]:
        """Return the dependence along each dimension, for sources of these sizes."""
        return self.windows

    def target_size(self, sizes: Sequence[int]) -> tuple[int, ...]:
        return tuple(self._targets(window, size) for window, size in zip(self.windows, sizes, strict=True))

    def _targets(self, window: Window, size: int) -> int:
        if not self.ceil:
            return window.coarse_size(size)
        count = -(-(size + 2 * window.padding - window.extent) // window.stride) + 1
        # Leave out a window that would begin in the padding behind the input.
        return count - 1 if (count - 1) * window.stride >= size + window.padding else count

    def counts(self, axis: int, size: int, targets: Interval, with_padding: bool) -> list[int]:
        """Return over how many indices each of `targets` averages along a dimension, with or without the padding."""
        window = self.windows[axis]
        bounds = Interval(-window.padding, size + window.padding) if with_padding else Interval(0, size)
        return [len(window.reads(Interval(t, t + 1)) & bounds) for t in range(targets.start, targets.stop)]


@dataclass(frozen=True)
class AdaptivePooling:
    """Windows that cover the sources as evenly as integers permit, for given target sizes."""

    sizes: tuple[int, ...]

    smallest: ClassVar = 0

    @property
    def spatial(self) -> int:
        return len(self.sizes)

    def dependences(self, sizes: Sequence[int]) -> tuple[AdaptiveWindows, ...]:
        return tuple(map(AdaptiveWindows, sizes, self.sizes))

    def target_size(self, sizes: Sequence[int]) -> tuple[int, ...]:
        return self.sizes
