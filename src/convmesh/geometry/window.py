"""Sliding windows: which fine indices a coarse index reads, and which coarse indices read a fine one.

As a dependence, the fine side has the sources and the coarse side the targets.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from .interval import Interval


@dataclass(frozen=True, slots=True)
class Tap:
    """One index of a kernel, and the indices of both sides that it brings together: `step` apart on the fine side."""

    index: int
    coarse: Interval
    fine: Interval
    step: int

    def pieces(self, most: int) -> Iterator[Tap]:
        """The same in pieces of at most so many indices."""
        for first in range(0, len(self.coarse), most):
            count = min(most, len(self.coarse) - first)
            at = self.coarse.start + first, self.fine.start + first * self.step
            yield Tap(
                self.index,
                Interval(at[0], at[0] + count),
                Interval(at[1], at[1] + (count - 1) * self.step + 1),
                self.step,
            )


@dataclass(frozen=True, slots=True)
class Window:
    """Coarse index `o` reads the fine indices `o * stride - padding + dilation * j`, for `0 <= j < kernel`.

    The coarse side is the output of a convolution or a pooling, and the input of a transposed convolution.
    """

    kernel: int
    stride: int = 1
    padding: int = 0
    dilation: int = 1

    @property
    def extent(self) -> int:
        """How far one coarse index reaches over the fine side."""
        return self.dilation * (self.kernel - 1) + 1

    def coarse_size(self, fine_size: int) -> int:
        """How many coarse indices fit; not positive where the kernel is larger than the padded input."""
        return (fine_size + 2 * self.padding - self.extent) // self.stride + 1

    def fine_size(self, coarse_size: int, output_padding: int = 0) -> int:
        """The size of a transposed convolution's output."""
        return (coarse_size - 1) * self.stride - 2 * self.padding + self.extent + output_padding

    def reads(self, coarse: Interval) -> Interval:
        """The fine indices from the first to the last that `coarse` reads; overhangs where the input is padded."""
        if not coarse:
            return Interval(0, 0)
        start = coarse.start * self.stride - self.padding
        return Interval(start, (coarse.stop - 1) * self.stride - self.padding + self.extent)

    def read_by(self, fine: Interval) -> Interval:
        """The coarse indices from the first to the last that read anything between the ends of `fine`.

        Not bounded by the coarse side's size, and with dilation a few that step over `fine` may be among them.
        """
        if not fine:
            return Interval(0, 0)
        # o reads up to o * stride - padding + extent - 1, which has to be at least fine.start.
        start = -(-(fine.start + self.padding - self.extent + 1) // self.stride)
        # ... and from o * stride - padding on, which has to be at most fine.stop - 1.
        stop = (fine.stop - 1 + self.padding) // self.stride + 1
        return Interval(start, max(start, stop))

    def parts_read(self, coarse: Interval) -> tuple[Interval, ...]:
        """`reads` without what a dilation wider than all of `coarse` steps over: then a part for each tap."""
        span = (len(coarse) - 1) * self.stride + 1
        if not coarse or self.dilation <= span:
            return (self.reads(coarse),)
        first = coarse.start * self.stride - self.padding
        return tuple(Interval(first, first + span).shift(self.dilation * tap) for tap in range(self.kernel))

    def parts_read_by(self, fine: Interval) -> tuple[Interval, ...]:
        """`read_by` without those that step over all of `fine`, likewise; the last tap's readers come first."""
        if not fine or self.dilation <= len(fine):
            return (self.read_by(fine),)
        shifts = [self.dilation * tap - self.padding for tap in reversed(range(self.kernel))]
        parts = [
            Interval(-(-(fine.start - shift) // self.stride), (fine.stop - 1 - shift) // self.stride + 1)
            for shift in shifts
        ]
        return tuple(part for part in parts if part) or (Interval(0, 0),)

    def own_padding(self, fine: Interval, coarse: Interval) -> int | None:
        """The padding with which the operator takes exactly these fine indices to these coarse ones, if there is one.

        The results then lack what other fine indices add to them.
        """
        padding = fine.start + self.padding - coarse.start * self.stride
        if not fine or not coarse or padding < 0:
            return None
        local = Window(self.kernel, self.stride, padding, self.dilation)
        return padding if local.coarse_size(len(fine)) == len(coarse) else None

    def taps(self, fine: Interval, coarse: Interval) -> list[Tap]:
        """The indices of the kernel with which any of `coarse` reads any of `fine`, and which do."""
        found = []
        for index in range(self.kernel):
            shift = self.dilation * index - self.padding
            first, last = -(-(fine.start - shift) // self.stride), (fine.stop - 1 - shift) // self.stride
            readers = Interval(first, last + 1) & coarse
            if fine and readers:
                start, end = (reader * self.stride + shift for reader in (readers.start, readers.stop - 1))
                found.append(Tap(index, readers, Interval(start, end + 1), self.stride))
        return found
