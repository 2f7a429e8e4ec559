"""Sliding windows: the fine indices that a coarse index reads, and the coarse indices that read a fine one.

As a dependence, the sources are on the fine side and the targets on the coarse side.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from .interval import Interval


@dataclass(frozen=True, slots=True)
class Tap:
    """One kernel index and the coarse and fine indices it connects; the fine ones are `step` apart."""

    index: int
    coarse: Interval
    fine: Interval
    step: int

    def pieces(self, most: int) -> Iterator[Tap]:
        """Yield the tap in pieces of at most `most` indices."""
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

    The coarse side is the output of a convolution or pooling, and the input of a transposed convolution.
    """

    kernel: int
    stride: int = 1
    padding: int = 0
    dilation: int = 1

    @property
    def extent(self) -> int:
        """The number of fine indices from the first to the last that one coarse index reads."""
        return self.dilation * (self.kernel - 1) + 1

    def coarse_size(self, fine_size: int) -> int:
        """Return the number of coarse indices that fit; not positive if the kernel is larger than the padded input."""
        return (fine_size + 2 * self.padding - self.extent) // self.stride + 1

    def fine_size(self, coarse_size: int, output_padding: int = 0) -> int:
        """Return the size of a transposed convolution's output."""
        return (coarse_size - 1) * self.stride - 2 * self.padding + self.extent + output_padding

    def reads(self, coarse: Interval) -> Interval:
        """Return the range of fine indices that `coarse` reads; it overhangs where the input is padded."""
        if not coarse:
            return Interval(0, 0)
        start = coarse.start * self.stride - self.padding
        return Interval(start, (coarse.stop - 1) * self.stride - self.padding + self.extent)

    def read_by(self, fine: Interval) -> Interval:
        """Return the range from the first to the last coarse index that reads anything between the ends of `fine`.

        It is not clipped to the size of the coarse side, and with dilation it may include indices that step over
        `fine`.
        """
        if not fine:
            return Interval(0, 0)
        # o reads up to o * stride - padding + extent - 1, which must be at least fine.start.
        start = -(-(fine.start + self.padding - self.extent + 1) // self.stride)
        # ... and from o * stride - padding on, which must be at most fine.stop - 1.
        stop = (fine.stop - 1 + self.padding) // self.stride + 1
        return Interval(start, max(start, stop))

    def parts_read(self, coarse: Interval) -> tuple[Interval, ...]:
        """Return `reads`, or one part per kernel index if the dilation is wider than all of `coarse`."""
        span = (len(coarse) - 1) * self.stride + 1
        if not coarse or self.dilation <= span:
            return (self.reads(coarse),)
        first = coarse.start * self.stride - self.padding
        return tuple(Interval(first, first + span).shift(self.dilation * tap) for tap in range(self.kernel))

    def parts_read_by(self, fine: Interval) -> tuple[Interval, ...]:
        """Return `read_by`, or one part per kernel index, the last first, if the dilation is wider than `fine`.

        The parts leave out coarse indices that step over all of `fine`.
        """
        if not fine or self.dilation <= len(fine):
            return (self.read_by(fine),)
        shifts = [self.dilation * tap - self.padding for tap in reversed(range(self.kernel))]
        parts = [
            Interval(-(-(fine.start - shift) // self.stride), (fine.stop - 1 - shift) // self.stride + 1)
            for shift in shifts
        ]
        return tuple(part for part in parts if part) or (Interval(0, 0),)

    def own_padding(self, fine: Interval, coarse: Interval) -> int | None:
        """Return the padding with which the operator maps exactly `fine` to `coarse`, or None if there is none.

        The results then lack the contributions of all other fine indices.
        """
        padding = fine.start + self.padding - coarse.start * self.stride
        if not fine or not coarse or padding < 0:
            return None
        local = Window(self.kernel, self.stride, padding, self.dilation)
        return padding if local.coarse_size(len(fine)) == len(coarse) else None

    def taps(self, fine: Interval, coarse: Interval) -> list[Tap]:
        """Return the kernel indices with which any of `coarse` reads any of `fine`, each with the indices that do."""
        found = []
        for index in range(self.kernel):
            shift = self.dilation * index - self.padding
            first, last = -(-(fine.start - shift) // self.stride), (fine.stop - 1 - shift) // self.stride
            readers = Interval(first, last + 1) & coarse
            if fine and readers:
                start, end = (reader * self.stride + shift for reader in (readers.start, readers.stop - 1))
                found.append(Tap(index, readers, Interval(start, end + 1), self.stride))
        return found
