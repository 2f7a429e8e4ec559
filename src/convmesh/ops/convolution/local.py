"""Convolution of local tensors: the three maps between fine side, coarse side and weight.

A convolution takes the fine side to the coarse side (`down`), a transposed one the coarse to the fine (`up`);
each is the other's gradient, and both have the same weight gradient (`weight`). All three take boxes of the
sharded dimensions, and treat the others as the operator does. So there is one code for both kinds and both directions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch

from ...comm import Held
from ...geometry import Box, Convolution, Window
from ...kernels.convolution import bias_gradient, convolution, convolution_backward
from ...kernels.turn import Turn
from ...kernels.weight_gradient import weight_gradient
from . import gathered
from .gathered import Gathered
from .operator_padding import Crop
from .tile import ConvolutionTiling

aten = torch.ops.aten


@dataclass(frozen=True)
class LocalConvolution:
    """A convolution with the groups and channels that this rank has, on a tile of its spatial dimensions."""

    conv: Convolution
    windows: tuple[Window, ...]
    fine_sizes: tuple[int, ...]
    coarse_sizes: tuple[int, ...]
    tiling: ConvolutionTiling

    def gathered(self, tile: torch.Tensor, fine: bool) -> Gathered | None:
        """How a small tile is computed with the halos of its fine or coarse side, in one block."""
        # A compiled exchange is awaited where it starts, and so there is nothing to do meanwhile, whatever the size.
        if 0 in tile.shape or (type(tile) is torch.Tensor and tile.numel() > gathered.FEW_ELEMENTS):
            return None
        return self._of_fine_block if fine else self._of_coarse_block

    @cached_property
    def _of_fine_block(self) -> Gathered | None:
        return Gathered.of(self.conv, self.tiling, True)

    @cached_property
    def _of_coarse_block(self) -> Gathered | None:
        return Gathered.of(self.conv, self.tiling, False)

    def own(self, input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """The operator on what the rank owns; along sharded dimensions the border lacks what other ranks own."""
        if not input.numel() or not weight.numel():
            sizes = list(self.fine_sizes if self.conv.transposed else self.coarse_sizes)
            for axis, side in zip(self._sharded, self.tiling.produced_by(self.conv.transposed)[0], strict=True):
                sizes[axis] = len(side)
            return _only_bias(input, self.conv.output_channels(weight.shape), sizes, bias)
        return convolution(input, weight, bias, self._own)

    def own_gradients(
        self, gradient: torch.Tensor, input: torch.Tensor, weight: torch.Tensor, mask: Sequence[bool]
    ) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
        """Of input, weight and bias from what the rank owns, in one call of the operator."""
        if not (mask[0] or mask[1]) or not gradient.numel() or not input.numel() or not weight.numel():
            zeros = [torch.zeros_like(t) if wanted else None for t, wanted in zip((input, weight), mask, strict=False)]
            return zeros[0], zeros[1], bias_gradient(gradient) if mask[2] else None
        return convolution_backward(gradient, input, weight, self._own, mask)

    def part(
        self, held: Held, box: Box, weight: torch.Tensor, bias: torch.Tensor | None, to_fine: bool
    ) -> torch.Tensor:
        """A box of the fine or of the coarse side, of what is held of the other one."""
        if to_fine:
            return self.up(held.read(self.tiling.read_by(box)), weight, bias, box)
        return self.down(held.read(self.tiling.reads(box)), weight, bias)

    def down(self, fine: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """The coarse values of a fine block that is exactly what they read."""
        if not fine.numel() or not weight.numel():
            sizes = list(self.coarse_sizes)
            for axis in self._sharded:
                sizes[axis] = self._windows_in(fine, axis)
            return _only_bias(fine, weight.shape[0], sizes, bias)
        result = _convolve(fine, weight, bias, self.conv, self._padding, None)
        for axis, unread in enumerate(self._unread(fine)):
            result = result.narrow(2 + axis, 0, result.shape[2 + axis] - unread) if unread else result
        return result

    def up(self, coarse: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, box: Box) -> torch.Tensor:
        """The fine values in `box`, of a coarse block that is exactly what reads them."""
        sizes = list(self.fine_sizes)
        for axis, wanted in zip(self._sharded, box, strict=True):
            sizes[axis] = len(wanted)
        if not coarse.numel() or not weight.numel():
            return _only_bias(coarse, weight.shape[1] * self.conv.groups, sizes, bias)
        crops = [self._crop(axis, sizes[axis]) for axis in range(len(sizes))]
        for axis, wanted, reach in zip(self._sharded, box, self.tiling.reads(self.tiling.read_by(box)), strict=True):
            crops[axis] = Crop.of(self.windows[axis], wanted.start - reach.start, reach.stop - wanted.stop)
        rest = [side for crop in reversed(crops) for side in (-crop.before, -crop.after)]
        result = _convolve(
            coarse, weight, None if any(rest) else bias, self.conv,
            [crop.padding for crop in crops], [crop.extra for crop in crops],
        )  # fmt: skip
        if any(rest):
            result = aten.constant_pad_nd.default(result, rest)
            if bias is not None:
                result += bias.view(-1, *[1] * len(sizes))
        return result

    def _crop(self, axis: int, fine_size: int) -> Crop:
        """Along a dimension that is not sharded: what the operator itself does."""
        window = self.windows[axis]
        return Crop(window.padding, fine_size - window.fine_size(self.coarse_sizes[axis]), 0, 0)

    def weight_gradient(self, fine: torch.Tensor, coarse: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Of a coarse block and the fine block that it reads."""
        if not fine.numel() or not coarse.numel():
            return torch.zeros_like(weight)
        unread = self._unread(fine)
        if any(unread):
            coarse = aten.constant_pad_nd.default(coarse, [side for count in reversed(unread) for side in (0, count)])
        return weight_gradient(fine, coarse, weight, replace(self.conv, padding=tuple(self._padding)))

    def _windows_in(self, fine: torch.Tensor, axis: int) -> int:
        window = self.windows[axis]
        held = Window(window.kernel, window.stride, self._padding[axis], window.dilation)
        return max(0, held.coarse_size(fine.shape[2 + axis]))

    def _unread(self, fine: torch.Tensor) -> list[int]:
        """How many windows too many a fine block has: output padding may be more than a stride leaves over."""
        axes = enumerate(self.coarse_sizes)
        return [0 if axis in self._sharded else self._windows_in(fine, axis) - size for axis, size in axes]

    @cached_property
    def planes(self) -> tuple[LocalConvolution, ...]:
        """For each sharded dimension, the convolution of a plane across it: without that dimension.

        A sole spatial dimension stays, with nothing to do along it.
        """
        return tuple(self._across(number) for number in range(len(self.tiling.dims)))

    def _across(self, number: int) -> LocalConvolution:
        axis = self._sharded[number]
        conv, windows = self.conv.without(axis), self.windows[:axis] + self.windows[axis + 1 :]
        sizes = [sizes[:axis] + sizes[axis + 1 :] for sizes in (self.fine_sizes, self.coarse_sizes)]
        if not windows:
            conv = replace(conv, stride=(1,), padding=(0,), dilation=(1,), output_padding=(0,))
            windows, sizes = (Window(kernel=1),), [(1,), (1,)]
        return LocalConvolution(conv, windows, sizes[0], sizes[1], self.tiling.without(number))

    @cached_property
    def _own(self) -> Convolution:
        """The geometry with which the operator takes a tile's own sides to each other."""
        padding, extra = list(self.conv.padding), list(self.conv.output_padding)
        tiling = self.tiling
        for axis, fine, coarse in zip(self._sharded, tiling.sources, tiling.targets, strict=True):
            assert tiling.own_padding is not None
            padding[axis] = tiling.own_padding[axis + 2]
            window = self.windows[axis]
            local = Window(window.kernel, window.stride, padding[axis], window.dilation)
            extra[axis] = len(fine) - local.fine_size(len(coarse)) if self.conv.transposed else 0
        return replace(self.conv, padding=tuple(padding), output_padding=tuple(extra))

    @cached_property
    def _padding(self) -> list[int]:
        """A box of a sharded dimension has its padding with it, as zeros."""
        return [0 if axis in self._sharded else window.padding for axis, window in enumerate(self.windows)]

    @cached_property
    def _sharded(self) -> tuple[int, ...]:
        return tuple(dim - 2 for dim in self.tiling.dims)


def _convolve(
    tensor: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    conv: Convolution,
    padding: Sequence[int],
    extra: Sequence[int] | None,
) -> torch.Tensor:
    """`extra` is a transposed convolution's output padding; None for a plain one."""
    transposed = extra is not None
    zeros = [0] * len(padding)
    turn = Turn.of(tensor)
    result = aten.convolution.default(
        turn.tensor(tensor), turn.tensor(weight), bias, turn.sizes(conv.stride), turn.sizes(padding),
        turn.sizes(conv.dilation), transposed, turn.sizes(extra or zeros), conv.groups,
    )  # fmt: skip
    return turn.back(result)


def _only_bias(like: torch.Tensor, channels: int, sizes: Sequence[int], bias: torch.Tensor | None) -> torch.Tensor:
    """A convolution over no batch, no channels or no indices: torch refuses some of these."""
    result = like.new_zeros([like.shape[0], channels, *sizes])
    return result if bias is None else result + bias.view(-1, *[1] * len(sizes))
