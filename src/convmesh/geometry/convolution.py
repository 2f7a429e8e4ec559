"""The parameters of a convolution as one value, in place of torch's six arguments."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from .window import Window

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Convolution:
    """Stride, padding, dilation and output padding for each spatial dimension, and the groups."""

    stride: Shape
    padding: Shape
    dilation: Shape
    transposed: bool
    output_padding: Shape
    groups: int

    @staticmethod
    def of(
        spatial: int,
        stride: Sequence[int],
        padding: Sequence[int],
        dilation: Sequence[int],
        transposed: bool,
        output_padding: Sequence[int],
        groups: int,
    ) -> Convolution:
        """Build one from an operator's arguments; a single number stands for all spatial dimensions."""

        def each(values: Sequence[int]) -> Shape:
            return tuple(values) * spatial if len(values) == 1 else tuple(values)

        return Convolution(each(stride), each(padding), each(dilation), transposed, each(output_padding), groups)

    @property
    def arguments(self) -> tuple[Shape, Shape, Shape, bool, Shape, int]:
        """The arguments in the order in which torch's operators take them."""
        return self.stride, self.padding, self.dilation, self.transposed, self.output_padding, self.groups

    def without(self, axis: int) -> Convolution:
        """Return the same convolution without spatial dimension `axis`."""

        def rest(values: Shape) -> Shape:
            return values[:axis] + values[axis + 1 :]

        return replace(
            self, stride=rest(self.stride), padding=rest(self.padding), dilation=rest(self.dilation),
            output_padding=rest(self.output_padding),
        )  # fmt: skip

    def windows(self, kernel: Sequence[int]) -> tuple[Window, ...]:
        return tuple(Window(*sizes) for sizes in zip(kernel, self.stride, self.padding, self.dilation, strict=True))

    def output_size(self, input_size: Sequence[int], kernel: Sequence[int]) -> Shape:
        windows = self.windows(kernel)
        if self.transposed:
            sides = zip(windows, input_size, self.output_padding, strict=True)
            return tuple(window.fine_size(size, extra) for window, size, extra in sides)
        return tuple(window.coarse_size(size) for window, size in zip(windows, input_size, strict=True))

    def output_channels(self, weight_shape: Sequence[int]) -> int:
        return weight_shape[1] * self.groups if self.transposed else weight_shape[0]

    def input_channels(self, weight_shape: Sequence[int]) -> int:
        return weight_shape[0] if self.transposed else weight_shape[1] * self.groups
