"""The blocks of a global tensor that a rank holds: its own shard, and received halos."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ..geometry import Box, Interval, volume
from ..strides import memory_format


@dataclass(frozen=True)
class Block:
    """A box of the global tensor along the sharded dimensions, and its data, with full local size along the others."""

    box: Box
    data: torch.Tensor


@dataclass(frozen=True)
class Held:
    """Disjoint blocks of one global tensor from which any box can be read; the rest of a box reads as a fill value."""

    dims: tuple[int, ...]
    blocks: tuple[Block, ...]

    @staticmethod
    def own(data: torch.Tensor, dims: tuple[int, ...], box: Box) -> Held:
        return Held(dims, (Block(box, data),))

    def plus(self, blocks: Sequence[Block]) -> Held:
        return Held(self.dims, (*self.blocks, *blocks))

    def read(self, box: Box, within: Box | None = None, fill: float = 0) -> torch.Tensor:
        """Return the values in `box`; with `within`, elements outside of that box are `fill`.

        The result is a view if one block contains all of it, else a new tensor in the memory format of the own block.
        """
        readable = box if within is None else _intersection(box, within)
        if readable == box and volume(box):
            for block in self.blocks:
                if all(map(Interval.covers, block.box, box)):
                    return self._narrow(block, box)
        parts = [(_intersection(block.box, readable), block) for block in self.blocks]
        parts = [(common, block) for common, block in parts if volume(common)]
        result = self._allocate(box, complete=sum(volume(common) for common, _ in parts) == volume(box), fill=fill)
        for common, block in parts:
            self._narrow(Block(box, result), common).copy_(self._narrow(block, common))
        return result

    def _narrow(self, block: Block, box: Box) -> torch.Tensor:
        data = block.data
        for dim, held, wanted in zip(self.dims, block.box, box, strict=True):
            if held != wanted:
                data = data.narrow(dim, wanted.start - held.start, wanted.size)
        return data

    def _allocate(self, box: Box, complete: bool, fill: float) -> torch.Tensor:
        model = self.blocks[0].data
        shape = list(model.shape)
        for dim, side in zip(self.dims, box, strict=True):
            shape[dim] = side.size
        result = torch.empty(shape, dtype=model.dtype, device=model.device, memory_format=memory_format(model))
        # Filling costs a pass over the result, which a box that the blocks cover completely does not need.
        return result if complete else result.fill_(fill)


def _intersection(one: Box, other: Box) -> Box:
    return tuple(a & b for a, b in zip(one, other, strict=True))
